// Status and Result: how the core reports errors. The core throws no exceptions and never exits the process.
//
//   Status s = cache.Prefetch(...);
//   if (!s.ok()) LOG << s.message();
//   HVD_CTR_RETURN_IF_ERROR(store.Load(...));
#ifndef HVD_CTR_CORE_STATUS_H_
#define HVD_CTR_CORE_STATUS_H_

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>

#if defined(__CUDACC__)
// nvcc's front end takes `status = f();` for a value that is dropped. The host compiler, which sees the same code, does not.
#pragma nv_diag_suppress 2810
#endif

namespace hvd_ctr {

/// Values travel between ranks in error payloads (key_exchange.h): never renumber.
enum class StatusCode : int32_t {
  kOk = 0,
  kInvalidArgument = 1,
  kOutOfRange = 2,
  kResourceExhausted = 3,
  kFailedPrecondition = 4,
  kNotFound = 5,
  kDataLoss = 6,
  kInternal = 7,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return Status(); }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

namespace internal {
template <typename... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}
}  // namespace internal

/// MakeStatus(StatusCode::kNotFound, "ticket ", 7, " is not open"): the parts are streamed into the message.
template <typename... Args>
Status MakeStatus(StatusCode code, const Args&... args) {
  return Status(code, internal::StrCat(args...));
}

/// A value or the Status that explains its absence.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  /// Precondition: ok().
  T& value() { return value_; }
  const T& value() const { return value_; }

 private:
  T value_{};
  Status status_;
};

}  // namespace hvd_ctr

#define HVD_CTR_RETURN_IF_ERROR(expr)                  \
  do {                                                 \
    ::hvd_ctr::Status hvd_ctr_status_ = (expr);        \
    if (!hvd_ctr_status_.ok()) return hvd_ctr_status_; \
  } while (false)

#endif  // HVD_CTR_CORE_STATUS_H_
