// Errors, which Python raises as the classes of shmacc.errors.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shmacc {

// Each names a class of shmacc.errors, which module.cpp raises.
enum class Failure {
    kInvalidArgument,
    kDeadlineExceeded,
    kCancelled,
    kNotFound,
    kFailedPrecondition,
    kResourceExhausted,
    kPermissionDenied,
    kOutOfRange,
    kDataLoss,
    kAlreadyExists,
    kWorkerDied,
    kFinished,
    kChiefDied,
    kInternal,
};

class Error : public std::exception {
  public:
    // Attributes that the Python exception gets: numbers, tuples of numbers, and tuples of texts.
    using Fields = std::vector<std::pair<const char*, int64_t>>;
    using Lists = std::vector<std::pair<const char*, std::vector<int64_t>>>;
    using Texts = std::vector<std::pair<const char*, std::vector<std::string>>>;

    Error(Failure failure, std::string message, Fields fields = {}, Lists lists = {}, Texts texts = {})
        : failure_(failure), message_(std::move(message)), fields_(std::move(fields)),
          lists_(std::move(lists)), texts_(std::move(texts)) {}
    const char* what() const noexcept override { return message_.c_str(); }
    Failure failure() const { return failure_; }
    const Fields& fields() const { return fields_; }
    std::optional<int64_t> field(const std::string& name) const {
        for (const auto& field : fields_)
            if (name == field.first) return field.second;
        return std::nullopt;
    }
    const Lists& lists() const { return lists_; }
    const Texts& texts() const { return texts_; }
    // The same error, with the name of a group's member.
    Error of_member(const std::string& name) const {
        return Error(failure_, "Member '" + name + "': " + message_, fields_, lists_, texts_);
    }

  private:
    Failure failure_;
    std::string message_;
    Fields fields_;
    Lists lists_;
    Texts texts_;
};

[[noreturn]] inline void data_loss(const std::string& what) {
    throw Error(Failure::kDataLoss, "The segment is damaged: " + what);
}

}  // namespace shmacc
