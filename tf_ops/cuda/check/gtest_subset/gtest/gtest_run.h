// Registration and running of tests.
#ifndef HVD_CTR_CUDA_CHECK_GTEST_SUBSET_GTEST_RUN_H_
#define HVD_CTR_CUDA_CHECK_GTEST_SUBSET_GTEST_RUN_H_

#pragma GCC system_header

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace testing {

class Test;

namespace internal {

enum class Outcome { kFailure, kFatalFailure, kSkip };

struct TestInfo {
  std::string suite;
  std::string name;
  std::function<std::unique_ptr<Test>()> make;  // Empty: the test fails.
};

/// Tests whose parameters are known only once all static objects are made.
class Expandable {
 public:
  virtual ~Expandable() = default;
  virtual void Expand(std::vector<TestInfo>* all) = 0;
};

struct State {
  std::mutex mutex;  // Over the outcome: threads of a test may fail.
  bool failed = false;
  bool fatal = false;
  bool skipped = false;
  std::string filter = "*";
  bool list = false;
  bool brief = false;
};
inline State& TheState() {
  static State* state = new State;
  return *state;
}
inline std::vector<TestInfo>& Tests() {
  static auto* tests = new std::vector<TestInfo>;
  return *tests;
}
inline std::vector<Expandable*>& Expandables() {
  static auto* expandables = new std::vector<Expandable*>;
  return *expandables;
}
/// Of the calling thread.
inline std::vector<std::string>& Traces() {
  thread_local std::vector<std::string> traces;
  return traces;
}

inline std::string Place(const char* file, int line) { return std::string(file) + ":" + std::to_string(line) + ": "; }

inline void Record(Outcome outcome, const char* file, int line, const std::string& what, const std::string& message) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (outcome == Outcome::kSkip) {
    state.skipped = true;
  } else {
    state.failed = true;
    state.fatal = state.fatal || outcome == Outcome::kFatalFailure;
  }
  std::printf("%s%s\n%s%s%s\n", Place(file, line).c_str(), outcome == Outcome::kSkip ? "Skipped" : "Failure", what.c_str(),
              message.empty() ? "" : "\n", message.c_str());
  for (auto trace = Traces().rbegin(); trace != Traces().rend(); ++trace) std::printf("Trace: %s\n", trace->c_str());
  std::fflush(stdout);
}

}  // namespace internal

class Test {
 public:
  virtual ~Test() = default;
  static bool HasFatalFailure() {
    return Locked([](const internal::State& state) { return state.fatal; });
  }
  static bool HasFailure() {
    return Locked([](const internal::State& state) { return state.failed; });
  }
  static bool IsSkipped() {
    return Locked([](const internal::State& state) { return state.skipped; });
  }

  void Run() {
    SetUp();
    if (!HasFatalFailure() && !IsSkipped()) TestBody();
    TearDown();
  }

 protected:
  Test() = default;
  virtual void SetUp() {}
  virtual void TearDown() {}

 private:
  virtual void TestBody() = 0;

  template <typename Function>
  static bool Locked(const Function& function) {
    internal::State& state = internal::TheState();
    const std::lock_guard<std::mutex> lock(state.mutex);
    return function(state);
  }
};

namespace internal {

template <typename T>
std::unique_ptr<Test> Make() {
  return std::make_unique<T>();
}

inline int AddTest(const char* suite, const char* name, std::function<std::unique_ptr<Test>()> make) {
  Tests().push_back({suite, name, std::move(make)});
  return 0;
}

/// '*' any text, '?' any character.
inline bool Matches(const char* pattern, const char* pattern_end, const char* text) {
  if (pattern == pattern_end) return *text == '\0';
  if (*pattern == '*')
    return Matches(pattern + 1, pattern_end, text) || (*text != '\0' && Matches(pattern, pattern_end, text + 1));
  return *text != '\0' && (*pattern == '?' || *pattern == *text) && Matches(pattern + 1, pattern_end, text + 1);
}
inline bool MatchesAny(const std::string& patterns, const std::string& text) {
  for (size_t begin = 0; begin <= patterns.size();) {
    const size_t end = std::min(patterns.find(':', begin), patterns.size());
    if (Matches(patterns.data() + begin, patterns.data() + end, text.c_str())) return true;
    begin = end + 1;
  }
  return false;
}
/// PATTERNS[-PATTERNS that are left out], each separated by ':'.
inline bool Selected(const std::string& filter, const std::string& text) {
  const size_t dash = filter.find('-');
  if (dash == std::string::npos) return MatchesAny(filter, text);
  return MatchesAny(dash == 0 ? "*" : filter.substr(0, dash), text) && !MatchesAny(filter.substr(dash + 1), text);
}

inline void RunOne(const TestInfo& info) {
  if (!info.make) return Record(Outcome::kFailure, __FILE__, __LINE__, info.name + " is not instantiated", "");
  try {
    info.make()->Run();
  } catch (const std::exception& e) {
    Record(Outcome::kFatalFailure, __FILE__, __LINE__, std::string("exception in the test: ") + e.what(), "");
  } catch (...) {
    Record(Outcome::kFatalFailure, __FILE__, __LINE__, "exception in the test", "");
  }
}

inline int Summarize(size_t ran, const std::vector<std::string>& failed, const std::vector<std::string>& skipped, long long ms) {
  std::printf("[==========] %zu tests ran. (%lld ms total)\n[  PASSED  ] %zu tests.\n", ran, ms,
              ran - failed.size() - skipped.size());
  if (!skipped.empty()) std::printf("[  SKIPPED ] %zu tests.\n", skipped.size());
  if (!failed.empty()) std::printf("[  FAILED  ] %zu tests, listed below:\n", failed.size());
  for (const std::string& name : failed) std::printf("[  FAILED  ] %s\n", name.c_str());
  return failed.empty() ? 0 : 1;
}

inline int RunAll() {
  State& state = TheState();
  std::vector<TestInfo> all = Tests();
  for (Expandable* expandable : Expandables()) expandable->Expand(&all);
  std::vector<std::string> failed, skipped;
  size_t ran = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (const TestInfo& info : all) {
    const std::string name = info.suite + "." + info.name;
    if (!Selected(state.filter, name)) continue;
    if (state.list) {
      std::printf("%s\n", name.c_str());
      continue;
    }
    ++ran;
    state.failed = state.fatal = state.skipped = false;
    if (!state.brief) std::printf("[ RUN      ] %s\n", name.c_str());
    std::fflush(stdout);
    RunOne(info);
    if (state.failed) failed.push_back(name);
    if (state.skipped && !state.failed) skipped.push_back(name);
    if (!state.brief || state.failed) {
      std::printf("%s%s\n", state.failed ? "[  FAILED  ] " : state.skipped ? "[  SKIPPED ] " : "[       OK ] ", name.c_str());
    }
    std::fflush(stdout);
  }
  if (state.list) return 0;
  const auto spent = std::chrono::steady_clock::now() - begin;
  return Summarize(ran, failed, skipped, std::chrono::duration_cast<std::chrono::milliseconds>(spent).count());
}

}  // namespace internal

/// Takes the flags that it knows out of argv.
inline void InitGoogleTest(int* argc, char** argv) {
  internal::State& state = internal::TheState();
  int kept = 1;
  for (int i = 1; i < *argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--gtest_filter=", 0) == 0) {
      state.filter = argument.substr(15);
    } else if (argument == "--gtest_list_tests") {
      state.list = true;
    } else if (argument == "--gtest_brief=1") {
      state.brief = true;
    } else {
      argv[kept++] = argv[i];
    }
  }
  *argc = kept;
}

}  // namespace testing

#endif  // HVD_CTR_CUDA_CHECK_GTEST_SUBSET_GTEST_RUN_H_
