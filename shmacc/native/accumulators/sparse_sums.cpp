// Compiles sparse_sums.hpp for each type of sums.
#include "accumulators/sparse_sums.hpp"

#include "protocol/undo_arrays.hpp"

namespace shmacc {

template class Rows<float>;
template class Rows<double>;
template class Rows<int64_t>;
template class Rows<uint64_t>;

}  // namespace shmacc
