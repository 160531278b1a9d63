// Compiles sparse_sums.hpp for each type of sums.
#include "accumulators/sparse_sums.hpp"

namespace shmacc {

SHMACC_FOR_ALL_SUMS(template class, SparseSums);

}  // namespace shmacc
