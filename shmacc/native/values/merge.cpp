// Compiles merge.hpp for each type of sums.
#include "values/merge.hpp"

namespace shmacc {

SHMACC_FOR_ALL_SUMS(template class, Merge);

}  // namespace shmacc
