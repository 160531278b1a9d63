// Compiles merge.hpp for each type of sums.
#include "values/merge.hpp"

namespace shmacc {

template class Merge<float>;
template class Merge<double>;
template class Merge<int64_t>;
template class Merge<uint64_t>;
template bool reduce_arrays(float*, const std::vector<const float*>&, uint64_t, const Reduce&);
template bool reduce_arrays(double*, const std::vector<const double*>&, uint64_t, const Reduce&);
template bool reduce_arrays(int64_t*, const std::vector<const int64_t*>&, uint64_t, const Reduce&);
template bool reduce_arrays(uint64_t*, const std::vector<const uint64_t*>&, uint64_t, const Reduce&);

}  // namespace shmacc
