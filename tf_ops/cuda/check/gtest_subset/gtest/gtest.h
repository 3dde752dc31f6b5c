// The part of GoogleTest that the tests of the device check use, for machines that do not have GoogleTest.
// tests/launch/test_cuda_check.py builds the same suites against both and compares which tests run and pass. Differences: no XML,
// no death tests, no matchers, no typed tests; values are printed more plainly.
//
//   program [--gtest_filter=PATTERNS] [--gtest_list_tests] [--gtest_brief=1]          exits with 1 when a test fails
#ifndef HVD_CTR_CUDA_CHECK_GTEST_SUBSET_GTEST_H_
#define HVD_CTR_CUDA_CHECK_GTEST_SUBSET_GTEST_H_

// As an installed GoogleTest: comparisons of mixed signs in the tests are theirs to judge.
#pragma GCC system_header

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "gtest/gtest_print.h"
#include "gtest/gtest_run.h"

namespace testing {

/// What is streamed behind an assertion.
class Message {
 public:
  Message() = default;
  Message(const Message& other) { text_ << other.text(); }
  template <typename T>
  Message& operator<<(const T& value) {
    text_ << value;
    return *this;
  }
  Message& operator<<(bool value) {
    text_ << (value ? "true" : "false");
    return *this;
  }
  std::string text() const { return text_.str(); }
  friend std::ostream& operator<<(std::ostream& out, const Message& message) { return out << message.text(); }

 private:
  std::ostringstream text_;
};

/// True, or false with the reason.
class AssertionResult {
 public:
  explicit AssertionResult(bool ok, std::string message = "") : ok_(ok), message_(std::move(message)) {}
  explicit operator bool() const { return ok_; }
  const std::string& message() const { return message_; }
  template <typename T>
  AssertionResult& operator<<(const T& value) {
    message_ += (Message() << value).text();
    return *this;
  }

 private:
  bool ok_;
  std::string message_;
};
inline AssertionResult AssertionSuccess() { return AssertionResult(true); }
inline AssertionResult AssertionFailure() { return AssertionResult(false); }

namespace internal {

/// `AssertHelper(...) = Message() << ...` records one outcome.
class AssertHelper {
 public:
  AssertHelper(Outcome outcome, const char* file, int line, std::string what)
      : outcome_(outcome), file_(file), line_(line), what_(std::move(what)) {}
  void operator=(const Message& message) const { Record(outcome_, file_, line_, what_, message.text()); }

 private:
  const Outcome outcome_;
  const char* const file_;
  const int line_;
  const std::string what_;
};

class ScopedTrace {
 public:
  ScopedTrace(const char* file, int line, const Message& message) { Traces().push_back(Place(file, line) + message.text()); }
  ~ScopedTrace() { Traces().pop_back(); }
  ScopedTrace(const ScopedTrace&) = delete;
  ScopedTrace& operator=(const ScopedTrace&) = delete;
};

inline AssertionResult CheckBool(bool wanted, const AssertionResult& value, const char* text) {
  if (static_cast<bool>(value) == wanted) return AssertionResult(true);
  return AssertionResult(false, std::string("Value of: ") + text + "\n  Actual: " + (wanted ? "false" : "true") +
                                    (value.message().empty() ? "" : " (" + value.message() + ")") +
                                    "\nExpected: " + (wanted ? "true" : "false"));
}
template <typename T, std::enable_if_t<!std::is_same_v<T, AssertionResult>, int> = 0>
AssertionResult CheckBool(bool wanted, const T& value, const char* text) {
  return CheckBool(wanted, AssertionResult(static_cast<bool>(value)), text);
}

template <typename Compare, typename A, typename B>
AssertionResult CheckPair(const char* sign, const Compare& compare, const char* a_text, const char* b_text, const A& a,
                          const B& b) {
  if (compare(a, b)) return AssertionResult(true);
  return AssertionResult(
      false, std::string("Expected: (") + a_text + ") " + sign + " (" + b_text + "), actual: " + Print(a) + " vs " + Print(b));
}

struct StringsEqual {
  bool operator()(const char* a, const char* b) const {
    return a == b || (a != nullptr && b != nullptr && std::strcmp(a, b) == 0);
  }
};

/// At most 4 units in the last place apart; NaN equals nothing.
template <typename Float, typename Bits>
struct AlmostEqual {
  bool operator()(Float a, Float b) const {
    if (std::isnan(a) || std::isnan(b)) return false;
    const Bits x = Ordered(a), y = Ordered(b);
    return (x > y ? x - y : y - x) <= 4;
  }
  static Bits Ordered(Float value) {
    Bits bits;
    std::memcpy(&bits, &value, sizeof(bits));
    constexpr Bits kSign = Bits{1} << (sizeof(Bits) * 8 - 1);
    return (bits & kSign) != 0 ? ~bits + 1 : bits | kSign;
  }
};

struct Near {
  double most;
  bool operator()(double a, double b) const { return a == b || std::fabs(a - b) <= most; }
};

}  // namespace internal

// --- Parameters of TEST_P ---

template <typename T>
class WithParamInterface {
 public:
  using ParamType = T;
  static const T& GetParam() { return *parameter(); }
  static void SetParam(const T* value) { parameter() = value; }

 private:
  static const T*& parameter() {
    static const T* value = nullptr;
    return value;
  }
};
template <typename T>
class TestWithParam : public Test, public WithParamInterface<T> {};

template <typename T>
struct TestParamInfo {
  T param;
  size_t index;
};

template <typename... Ts>
struct ValueList {
  std::tuple<Ts...> values;
  template <typename T>
  std::vector<T> As() const {
    return std::apply([](const auto&... value) { return std::vector<T>{static_cast<T>(value)...}; }, values);
  }
};
template <typename V>
struct ValueVector {
  std::vector<V> values;
  template <typename T>
  std::vector<T> As() const {
    return std::vector<T>(values.begin(), values.end());
  }
};
template <typename... Generators>
struct Combination {
  std::tuple<Generators...> generators;
  template <typename T>
  std::vector<T> As() const {
    return Extend<T>(std::index_sequence_for<Generators...>());
  }

 private:
  /// The last generator runs fastest, as in GoogleTest.
  template <typename T, size_t... kIndices>
  std::vector<T> Extend(std::index_sequence<kIndices...>) const {
    const std::tuple lists(std::get<kIndices>(generators).template As<std::tuple_element_t<kIndices, T>>()...);
    std::vector<T> all;
    const size_t total = (std::get<kIndices>(lists).size() * ... * 1);
    for (size_t i = 0; i < total; ++i) {
      size_t left = total, at = i;
      const auto pick = [&](const auto& list) {
        left /= list.size();
        const size_t index = at / left;
        at %= left;
        return list[index];
      };
      all.push_back(T{pick(std::get<kIndices>(lists))...});
    }
    return all;
  }
};

template <typename... Ts>
ValueList<Ts...> Values(Ts... values) {
  return {std::tuple<Ts...>(std::move(values)...)};
}
inline ValueList<bool, bool> Bool() { return Values(false, true); }
template <typename Container>
auto ValuesIn(const Container& container) {
  using V = std::decay_t<decltype(*std::begin(container))>;
  return ValueVector<V>{std::vector<V>(std::begin(container), std::end(container))};
}
template <typename T>
ValueVector<T> Range(T begin, T end, T step = 1) {
  ValueVector<T> list;
  for (T value = begin; value < end; value = static_cast<T>(value + step)) list.values.push_back(value);
  return list;
}
template <typename... Generators>
Combination<Generators...> Combine(const Generators&... generators) {
  return {std::tuple<Generators...>(generators...)};
}

namespace internal {

/// The tests of one TEST_P suite, and what they are instantiated with.
template <typename Suite>
class ParamSuite final : public Expandable {
 public:
  using T = typename Suite::ParamType;
  using Namer = std::function<std::string(const TestParamInfo<T>&)>;

  static ParamSuite* Get(const char* name) {
    static ParamSuite* suite = new ParamSuite(name);
    return suite;
  }
  int AddTest(const char* name, std::function<std::unique_ptr<Test>()> make) {
    tests_.push_back({name, std::move(make)});
    return 0;
  }
  template <typename Generator>
  int Instantiate(const char* prefix, const Generator& generator, Namer namer = nullptr) {
    instances_.push_back({prefix, [generator] { return generator.template As<T>(); }, std::move(namer)});
    return 0;
  }
  void Expand(std::vector<TestInfo>* all) override {
    if (instances_.empty()) {
      all->push_back({"GoogleTestVerification", "UninstantiatedParameterizedTestSuite<" + name_ + ">", nullptr});
    }
    for (const Instance& instance : instances_) {
      auto values = std::make_shared<const std::vector<T>>(instance.values());
      for (const ParamTest& test : tests_) {
        for (size_t i = 0; i < values->size(); ++i) {
          const std::string label = instance.namer ? instance.namer({(*values)[i], i}) : std::to_string(i);
          all->push_back({std::string(instance.prefix) + "/" + name_, std::string(test.name) + "/" + label, [test, values, i] {
                            Suite::SetParam(&(*values)[i]);
                            return test.make();
                          }});
        }
      }
    }
  }

 private:
  explicit ParamSuite(const char* name) : name_(name) { Expandables().push_back(this); }
  struct ParamTest {
    const char* name;
    std::function<std::unique_ptr<Test>()> make;
  };
  struct Instance {
    const char* prefix;
    std::function<std::vector<T>()> values;
    Namer namer;
  };
  const std::string name_;
  std::vector<ParamTest> tests_;
  std::vector<Instance> instances_;
};

}  // namespace internal
}  // namespace testing

#define GTEST_SUBSET_NAME(suite, name) suite##_##name##_Test
#define GTEST_SUBSET_OUTCOME(outcome, what) \
  ::testing::internal::AssertHelper(::testing::internal::Outcome::outcome, __FILE__, __LINE__, what) = ::testing::Message()
#define GTEST_SUBSET_EXPECT(check)                                      \
  switch (0)                                                            \
  case 0:                                                               \
  default:                                                              \
    if (const ::testing::AssertionResult gtest_subset_result = (check)) \
      ;                                                                 \
    else                                                                \
      GTEST_SUBSET_OUTCOME(kFailure, gtest_subset_result.message())
#define GTEST_SUBSET_ASSERT(check)                                      \
  switch (0)                                                            \
  case 0:                                                               \
  default:                                                              \
    if (const ::testing::AssertionResult gtest_subset_result = (check)) \
      ;                                                                 \
    else                                                                \
      return GTEST_SUBSET_OUTCOME(kFatalFailure, gtest_subset_result.message())
#define GTEST_SUBSET_PAIR(sign, compare, a, b) ::testing::internal::CheckPair(sign, compare, #a, #b, a, b)

#define TEST_F(suite, name)                                                                                     \
  class GTEST_SUBSET_NAME(suite, name) : public suite {                                                         \
    void TestBody() override;                                                                                   \
    [[maybe_unused]] static inline const int registered_ =                                                      \
        ::testing::internal::AddTest(#suite, #name, ::testing::internal::Make<GTEST_SUBSET_NAME(suite, name)>); \
  };                                                                                                            \
  void GTEST_SUBSET_NAME(suite, name)::TestBody()
#define TEST(suite, name)                                                                                       \
  class GTEST_SUBSET_NAME(suite, name) : public ::testing::Test {                                               \
    void TestBody() override;                                                                                   \
    [[maybe_unused]] static inline const int registered_ =                                                      \
        ::testing::internal::AddTest(#suite, #name, ::testing::internal::Make<GTEST_SUBSET_NAME(suite, name)>); \
  };                                                                                                            \
  void GTEST_SUBSET_NAME(suite, name)::TestBody()
#define TEST_P(suite, name)                                                                                              \
  class GTEST_SUBSET_NAME(suite, name) : public suite {                                                                  \
    void TestBody() override;                                                                                            \
    [[maybe_unused]] static inline const int registered_ = ::testing::internal::ParamSuite<suite>::Get(#suite)->AddTest( \
        #name, ::testing::internal::Make<GTEST_SUBSET_NAME(suite, name)>);                                               \
  };                                                                                                                     \
  void GTEST_SUBSET_NAME(suite, name)::TestBody()
#define INSTANTIATE_TEST_SUITE_P(prefix, suite, ...)                     \
  [[maybe_unused]] static const int gtest_subset_##prefix##_##suite##_ = \
      ::testing::internal::ParamSuite<suite>::Get(#suite)->Instantiate(#prefix, __VA_ARGS__)

#define GTEST_SUBSET_JOIN2(a, b) a##b
#define GTEST_SUBSET_JOIN(a, b) GTEST_SUBSET_JOIN2(a, b)
#define SCOPED_TRACE(message)                                                                                 \
  const ::testing::internal::ScopedTrace GTEST_SUBSET_JOIN(gtest_subset_trace_, __LINE__)(__FILE__, __LINE__, \
                                                                                          ::testing::Message() << message)

#define ADD_FAILURE() GTEST_SUBSET_OUTCOME(kFailure, "Failed")
#define FAIL() return GTEST_SUBSET_OUTCOME(kFatalFailure, "Failed")
#define SUCCEED() static_cast<void>(0), ::testing::Message()
#define GTEST_SKIP() return GTEST_SUBSET_OUTCOME(kSkip, "Skipped")

#define EXPECT_TRUE(value) GTEST_SUBSET_EXPECT(::testing::internal::CheckBool(true, value, #value))
#define EXPECT_FALSE(value) GTEST_SUBSET_EXPECT(::testing::internal::CheckBool(false, value, #value))
#define ASSERT_TRUE(value) GTEST_SUBSET_ASSERT(::testing::internal::CheckBool(true, value, #value))
#define ASSERT_FALSE(value) GTEST_SUBSET_ASSERT(::testing::internal::CheckBool(false, value, #value))
#define EXPECT_EQ(a, b) GTEST_SUBSET_EXPECT(GTEST_SUBSET_PAIR("==", std::equal_to<>(), a, b))
#define EXPECT_NE(a, b) GTEST_SUBSET_EXPECT(GTEST_SUBSET_PAIR("!=", std::not_equal_to<>(), a, b))
#define EXPECT_LT(a, b) GTEST_SUBSET_EXPECT(GTEST_SUBSET_PAIR("<", std::less<>(), a, b))
#define EXPECT_LE(a, b) GTEST_SUBSET_EXPECT(GTEST_SUBSET_PAIR("<=", std::less_equal<>(), a, b))
#define EXPECT_GT(a, b) GTEST_SUBSET_EXPECT(GTEST_SUBSET_PAIR(">", std::greater<>(), a, b))
#define EXPECT_GE(a, b) GTEST_SUBSET_EXPECT(GTEST_SUBSET_PAIR(">=", std::greater_equal<>(), a, b))
#define ASSERT_EQ(a, b) GTEST_SUBSET_ASSERT(GTEST_SUBSET_PAIR("==", std::equal_to<>(), a, b))
#define ASSERT_NE(a, b) GTEST_SUBSET_ASSERT(GTEST_SUBSET_PAIR("!=", std::not_equal_to<>(), a, b))
#define ASSERT_LT(a, b) GTEST_SUBSET_ASSERT(GTEST_SUBSET_PAIR("<", std::less<>(), a, b))
#define ASSERT_LE(a, b) GTEST_SUBSET_ASSERT(GTEST_SUBSET_PAIR("<=", std::less_equal<>(), a, b))
#define ASSERT_GT(a, b) GTEST_SUBSET_ASSERT(GTEST_SUBSET_PAIR(">", std::greater<>(), a, b))
#define ASSERT_GE(a, b) GTEST_SUBSET_ASSERT(GTEST_SUBSET_PAIR(">=", std::greater_equal<>(), a, b))
#define EXPECT_STREQ(a, b) GTEST_SUBSET_EXPECT(GTEST_SUBSET_PAIR("==", ::testing::internal::StringsEqual(), a, b))
#define EXPECT_NEAR(a, b, most) GTEST_SUBSET_EXPECT(GTEST_SUBSET_PAIR("near", ::testing::internal::Near{most}, a, b))
#define ASSERT_NEAR(a, b, most) GTEST_SUBSET_ASSERT(GTEST_SUBSET_PAIR("near", ::testing::internal::Near{most}, a, b))
#define GTEST_SUBSET_FLOATS ::testing::internal::AlmostEqual<float, uint32_t>()
#define GTEST_SUBSET_DOUBLES ::testing::internal::AlmostEqual<double, uint64_t>()
#define EXPECT_FLOAT_EQ(a, b) GTEST_SUBSET_EXPECT(GTEST_SUBSET_PAIR("almost equals", GTEST_SUBSET_FLOATS, a, b))
#define ASSERT_FLOAT_EQ(a, b) GTEST_SUBSET_ASSERT(GTEST_SUBSET_PAIR("almost equals", GTEST_SUBSET_FLOATS, a, b))
#define EXPECT_DOUBLE_EQ(a, b) GTEST_SUBSET_EXPECT(GTEST_SUBSET_PAIR("almost equals", GTEST_SUBSET_DOUBLES, a, b))
#define ASSERT_DOUBLE_EQ(a, b) GTEST_SUBSET_ASSERT(GTEST_SUBSET_PAIR("almost equals", GTEST_SUBSET_DOUBLES, a, b))

#define RUN_ALL_TESTS() ::testing::internal::RunAll()

#endif  // HVD_CTR_CUDA_CHECK_GTEST_SUBSET_GTEST_H_
