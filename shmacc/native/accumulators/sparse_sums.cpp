// Compiles sparse_sums.hpp for each type of sums.
#include "accumulators/sparse_sums.hpp"

namespace shmacc {

template class SparseSums<float>;
template class SparseSums<double>;
template class SparseSums<int64_t>;
template class SparseSums<uint64_t>;

}  // namespace shmacc
