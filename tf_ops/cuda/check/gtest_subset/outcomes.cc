// Every outcome that the suites rely on and how they come to it: tests/launch/test_cuda_check.py runs this with the part of
// GoogleTest that is here and with GoogleTest, and compares. Not built by run.sh.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

class Fixture : public testing::Test {
 protected:
  void SetUp() override { value = 3; }
  int value = 0;
};
TEST_F(Fixture, SetUpRuns) {
  EXPECT_EQ(value, 3);
  if (value == 3)
    EXPECT_TRUE(true);
  else
    EXPECT_TRUE(false);
  for (int i = 0; i < 2; ++i) ASSERT_LT(i, 2) << "message";
}
TEST(Passes, Comparisons) {
  EXPECT_NE(1, 2);
  EXPECT_LE(1, 1);
  EXPECT_GT(2, 1);
  EXPECT_GE(2, 2);
  EXPECT_FALSE(false);
  EXPECT_STREQ("a", "a");
  EXPECT_FLOAT_EQ(1.0f, 1.0000001f);
  EXPECT_DOUBLE_EQ(0.1 + 0.2, 0.3);
  EXPECT_NEAR(1.0, 1.5, 0.5);
  EXPECT_FLOAT_EQ(0.0f, -0.0f);
}
TEST(Fails, Equal) { EXPECT_EQ((std::vector<int>{1, 2}), (std::vector<int>{1, 3})) << "message"; }
TEST(Fails, NotEqual) { EXPECT_NE(1, 1); }
TEST(Fails, Less) { EXPECT_LT(1, 1); }
TEST(Fails, LessOrEqual) { EXPECT_LE(2, 1); }
TEST(Fails, Greater) { EXPECT_GT(1, 1); }
TEST(Fails, GreaterOrEqual) { EXPECT_GE(1, 2); }
TEST(Fails, True) { EXPECT_TRUE(false); }
TEST(Fails, False) { EXPECT_FALSE(true); }
TEST(Fails, Near) { EXPECT_NEAR(1.0, 2.0, 0.5); }
TEST(Fails, Float) { EXPECT_FLOAT_EQ(1.0f, 1.000001f); }
TEST(Fails, Double) { EXPECT_DOUBLE_EQ(1.0, 1.000000000000002); }
TEST(Fails, NotANumber) { EXPECT_FLOAT_EQ(NAN, NAN); }
TEST(Fails, Strings) { EXPECT_STREQ("a", "b"); }
TEST(Fails, InAFunction) {
  []() { FAIL() << "message"; }();
  EXPECT_TRUE(HasFatalFailure());
  std::printf("went on\n");
}
TEST(Fails, Fatally) {
  SCOPED_TRACE("trace");
  ASSERT_TRUE(false);
  std::printf("NOT REACHED\n");
}
TEST(Fails, ByExceptions) { throw std::runtime_error("thrown"); }
TEST(Fails, Added) {
  ADD_FAILURE() << "message";
  EXPECT_TRUE(HasFailure());
  EXPECT_FALSE(HasFatalFailure());
}
TEST(Fails, InAThread) {
  std::thread([] { EXPECT_EQ(1, 2); }).join();
}
TEST(Skipped, ForAReason) {
  GTEST_SKIP() << "reason";
  std::printf("NOT REACHED\n");
}

class Combined : public testing::TestWithParam<std::tuple<int, bool, const char*>> {};
TEST_P(Combined, Named) { std::printf("%d %d %s\n", std::get<0>(GetParam()), std::get<1>(GetParam()), std::get<2>(GetParam())); }
INSTANTIATE_TEST_SUITE_P(Three, Combined, testing::Combine(testing::Range(0, 2), testing::Bool(), testing::Values("a", "b")),
                         [](const auto& info) { return "n" + std::to_string(info.index); });
class Numbers : public testing::TestWithParam<int64_t> {};
TEST_P(Numbers, BelowThree) { EXPECT_LT(GetParam(), 3); }
TEST_P(Numbers, AboveThree) { EXPECT_GT(GetParam(), 3); }
INSTANTIATE_TEST_SUITE_P(Two, Numbers, testing::Values(2, 4));
const std::vector<int64_t> kFive = {5};
INSTANTIATE_TEST_SUITE_P(One, Numbers, testing::ValuesIn(kFive));

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
