// Values in the messages of failed expectations.
#ifndef HVD_CTR_CUDA_CHECK_GTEST_SUBSET_GTEST_PRINT_H_
#define HVD_CTR_CUDA_CHECK_GTEST_SUBSET_GTEST_PRINT_H_

#pragma GCC system_header

#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

namespace testing {
namespace internal {

template <typename T, typename = void>
struct IsStreamable : std::false_type {};
template <typename T>
struct IsStreamable<T, std::void_t<decltype(std::declval<std::ostream&>() << std::declval<const T&>())>> : std::true_type {};
template <typename T, typename = void>
struct IsContainer : std::false_type {};
template <typename T>
struct IsContainer<T, std::void_t<decltype(std::begin(std::declval<const T&>())), decltype(std::end(std::declval<const T&>()))>>
    : std::true_type {};
template <typename T>
struct IsPair : std::false_type {};
template <typename A, typename B>
struct IsPair<std::pair<A, B>> : std::true_type {};

template <typename T>
std::string Print(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_same_v<T, std::string>) {
    out << '"' << value << '"';
  } else if constexpr (std::is_same_v<T, std::nullptr_t>) {
    out << "nullptr";
  } else if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    out.precision(std::numeric_limits<T>::max_digits10);
    out << value;
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 1) {
    out << static_cast<int>(value);
  } else if constexpr (IsStreamable<T>::value) {
    out << value;
  } else if constexpr (IsPair<T>::value) {
    out << '(' << Print(value.first) << ", " << Print(value.second) << ')';
  } else if constexpr (IsContainer<T>::value) {
    constexpr int kMost = 32;
    int count = 0;
    out << '{';
    for (const auto& element : value) {
      if (count++ == kMost) {
        out << ", ...";
        break;
      }
      out << (count == 1 ? " " : ", ") << Print(static_cast<const std::decay_t<decltype(element)>&>(element));
    }
    out << " }";
  } else {
    out << sizeof(T) << "-byte object";
  }
  return out.str();
}

}  // namespace internal
}  // namespace testing

#endif  // HVD_CTR_CUDA_CHECK_GTEST_SUBSET_GTEST_PRINT_H_
