// Floating-point numbers as every process begins with them: rounded to nearest, with subnormal numbers.
//
// A library may have set this process to flush subnormal numbers to zero, or to round in another way. The result of an
// update must not depend on the process that makes it.
#pragma once

#include <cfenv>

namespace shmacc {

class DefaultFloats {
  public:
    DefaultFloats() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { std::fesetenv(&before_); }
    DefaultFloats(const DefaultFloats&) = delete;
    DefaultFloats& operator=(const DefaultFloats&) = delete;

  private:
    std::fenv_t before_;
};

}  // namespace shmacc
