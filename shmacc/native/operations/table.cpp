// Compiles table.hpp for each type of sums.
#include "operations/table.hpp"

#include "protocol/saved_arrays.hpp"

namespace shmacc {

template class Rows<float>;
template class Rows<double>;
template class Rows<int64_t>;
template class Rows<uint64_t>;

}  // namespace shmacc
