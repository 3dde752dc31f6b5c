#include "tf_ops/core/shared_group.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/core/shared_collectives.h"

namespace hvd_ctr {
namespace {

using Groups = std::vector<std::unique_ptr<SharedGroup>>;

/// Ranks that are threads of this process.
Groups Connected(int32_t size, const SharedLimits& limits = {}) {
  Groups groups;
  std::vector<SharedAddress> addresses;
  for (int32_t rank = 0; rank < size; ++rank) {
    auto made = SharedGroup::Create(rank, size, limits);
    EXPECT_TRUE(made.ok()) << made.status().message();
    groups.push_back(std::move(made.value()));
    addresses.push_back(groups.back()->address());
  }
  for (const auto& group : groups) {
    const Status connected = group->Connect(addresses);
    EXPECT_TRUE(connected.ok()) << connected.message();
  }
  return groups;
}

template <typename Function>
void OnRanks(const Groups& groups, const Function& function) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < groups.size(); ++rank) {
    threads.emplace_back([&, rank] { function(groups[rank].get(), static_cast<int32_t>(rank)); });
  }
  for (std::thread& thread : threads) thread.join();
}

SharedChannel* ChannelOf(SharedGroup* group, const std::string& name) {
  auto channel = group->Channel(name);
  EXPECT_TRUE(channel.ok()) << channel.status().message();
  return channel.value();
}

int64_t Value(int32_t from, int32_t to, int64_t round, int64_t row) { return from * 1000 + to * 100 + round * 10000 + row; }

/// One alltoall of int64: rank r sends (r + to + round) % 4 * scale rows to each; returns what it got.
Status AllToAll(SharedChannel* channel, int64_t round, int64_t scale, std::vector<int64_t>* received) {
  const int32_t rank = channel->rank(), size = channel->size();
  std::vector<int64_t> splits, mine, others;
  for (int32_t to = 0; to < size; ++to) {
    splits.push_back((rank + to + round) % 4 * scale);
    for (int64_t row = 0; row < splits.back(); ++row) (to == rank ? mine : others).push_back(Value(rank, to, round, row));
  }
  const SharedMessage::Piece piece{others.data(), static_cast<int64_t>(others.size() * sizeof(int64_t))};
  const int64_t rows = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  HVD_CTR_RETURN_IF_ERROR(
      channel->Post({SharedOperation::kAllToAll, 8, splits, rows, Span<const SharedMessage::Piece>(&piece, 1)}));
  if (!channel->Arrived()) HVD_CTR_RETURN_IF_ERROR(channel->Wait());
  HVD_CTR_RETURN_IF_ERROR(channel->CheckPosted());
  received->resize(static_cast<size_t>(ArrivedRows(*channel)));
  CopyArrived(*channel, 8, mine.data(), received->data());
  channel->End();
  return Status::Ok();
}

std::vector<int64_t> Expected(int32_t to, int32_t size, int64_t round, int64_t scale) {
  std::vector<int64_t> expected;
  for (int32_t from = 0; from < size; ++from) {
    for (int64_t row = 0; row < (from + to + round) % 4 * scale; ++row) expected.push_back(Value(from, to, round, row));
  }
  return expected;
}

TEST(SharedGroupTest, RowsReachTheirRanksInOrderWhileTheyGrow) {
  for (const int32_t size : {1, 2, 3, 5}) {
    const Groups groups = Connected(size);
    OnRanks(groups, [size](SharedGroup* group, int32_t rank) {
      for (int64_t round = 0; round < 60; ++round) {
        const int64_t scale = round % 7 == 6 ? 3000 : round;  // Beyond the first slots, and small again.
        std::vector<int64_t> received;
        const Status status = AllToAll(ChannelOf(group, "rows"), round, scale, &received);
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_EQ(received, Expected(rank, size, round, scale)) << "rank " << rank << " of " << size << " round " << round;
      }
    });
  }
}

TEST(SharedGroupTest, ChannelsDoNotMeet) {
  const Groups groups = Connected(3);
  // Two threads per rank, and the ranks make their channels in different orders.
  OnRanks(groups, [](SharedGroup* group, int32_t rank) {
    std::vector<std::thread> threads;
    for (const std::string name : {rank % 2 == 0 ? "a" : "b", rank % 2 == 0 ? "b" : "a"}) {
      threads.emplace_back([group, rank, name] {
        for (int64_t round = 0; round < 50; ++round) {
          std::vector<int64_t> received;
          const int64_t shifted = name == "a" ? round : round + 1;
          ASSERT_TRUE(AllToAll(ChannelOf(group, name), shifted, 5, &received).ok());
          ASSERT_EQ(received, Expected(rank, 3, shifted, 5));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

template <typename T>
void CheckSums(int32_t size, SharedType type, const std::vector<int64_t>& shapes) {
  const Groups groups = Connected(size);
  OnRanks(groups, [&](SharedGroup* group, int32_t rank) {
    std::vector<char> scratch;
    for (int round = 0; round < 4; ++round) {
      std::vector<std::vector<T>> mine, sums;
      std::vector<SharedAddend> addends;
      const auto value = [round](int32_t of, size_t i) { return static_cast<T>((of + 1) * 0.37 + 0.11 * (i % 97) + round); };
      for (const int64_t elements : shapes) {
        mine.emplace_back();
        for (int64_t i = 0; i < elements; ++i) mine.back().push_back(value(rank, static_cast<size_t>(i)));
        sums.emplace_back(static_cast<size_t>(elements), T{-1});
      }
      for (size_t i = 0; i < shapes.size(); ++i) addends.push_back({mine[i].data(), sums[i].data(), shapes[i]});
      SharedChannel* channel = ChannelOf(group, "sum");
      ASSERT_TRUE(PostAllReduce(channel, type, addends).ok());
      ASSERT_TRUE(channel->Wait().ok());
      ASSERT_TRUE(channel->CheckPosted().ok());
      const Status status = FinishAllReduce(channel, type, addends, &scratch);
      ASSERT_TRUE(status.ok()) << status.message();
      channel->End();
      for (const std::vector<T>& sum : sums) {
        for (size_t i = 0; i < sum.size(); ++i) {
          T expected = value(0, i);
          for (int32_t of = 1; of < size; ++of) expected += value(of, i);
          ASSERT_EQ(sum[i], expected) << "element " << i << " on rank " << rank << " of " << size;
        }
      }
    }
  });
}

TEST(SharedGroupTest, SumsRunOverTheRanksInOrderBitForBit) {
  for (const int32_t size : {1, 2, 3, 4}) {
    for (const std::vector<int64_t>& shapes : {std::vector<int64_t>{5, 0, 3000}, std::vector<int64_t>{1, 200000, 7, 70000}}) {
      CheckSums<float>(size, SharedType::kFloat32, shapes);
    }
  }
  CheckSums<double>(3, SharedType::kFloat64, {150000, 3});
  CheckSums<int32_t>(3, SharedType::kInt32, {17, 300000});
  CheckSums<int64_t>(2, SharedType::kInt64, {17});
}

TEST(SharedGroupTest, MemoryIsWhatWasPlanned) {
  constexpr int64_t kBytes = 70000, kElements = 300000;  // Sums of so many are made in two phases.
  for (const int32_t size : {2, 3}) {
    const Groups groups = Connected(size);
    OnRanks(groups, [](SharedGroup* group, int32_t /*rank*/) {
      const std::vector<char> rows(kBytes);
      const std::vector<float> mine(kElements, 1.0f);
      std::vector<float> sums(kElements);
      std::vector<char> scratch;
      const SharedMessage::Piece piece{rows.data(), kBytes};
      const SharedAddend addend{mine.data(), sums.data(), kElements};
      for (int round = 0; round < 4; ++round) {
        SharedChannel* channel = ChannelOf(group, "rows");
        ASSERT_TRUE(
            channel->Post({SharedOperation::kAllGather, 1, {}, kBytes, Span<const SharedMessage::Piece>(&piece, 1)}).ok());
        ASSERT_TRUE(channel->Wait().ok());
        channel->End();
        channel = ChannelOf(group, "sum");
        ASSERT_TRUE(PostAllReduce(channel, SharedType::kFloat32, Span<const SharedAddend>(&addend, 1)).ok());
        ASSERT_TRUE(channel->Wait().ok());
        ASSERT_TRUE(channel->CheckPosted().ok());
        ASSERT_TRUE(FinishAllReduce(channel, SharedType::kFloat32, Span<const SharedAddend>(&addend, 1), &scratch).ok());
        channel->End();
      }
    });
    for (const auto& group : groups) {
      struct stat file = {};
      ASSERT_EQ(fstat(static_cast<int>(group->address().fd), &file), 0);
      EXPECT_EQ(int64_t{file.st_blocks} * 512, SharedGroup::PlannedBytes() + 2 * SharedChannel::PlannedSlotBytes(size, kBytes) +
                                                   PlannedAllReduceBytes(size, kElements * int64_t{sizeof(float)}));
    }
  }
}

TEST(SharedGroupTest, RanksThatDoDifferentThingsAreTold) {
  const Groups groups = Connected(2);
  OnRanks(groups, [](SharedGroup* group, int32_t rank) {
    SharedChannel* channel = ChannelOf(group, "mixed");
    const std::vector<int64_t> splits = {0, 0};
    ASSERT_TRUE(channel->Post({SharedOperation::kAllToAll, rank == 0 ? 64 : 256, splits, 0, {}}).ok());
    ASSERT_TRUE(channel->Wait().ok());
    const Status status = channel->CheckPosted();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("collective 'mixed'"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("rows of bytes"), std::string::npos) << status.message();
    EXPECT_EQ(channel->Post({SharedOperation::kAllToAll, 64, splits, 0, {}}).code(), StatusCode::kFailedPrecondition);
  });
}

TEST(SharedGroupTest, ARankThatDoesNotComeIsNamed) {
  SharedLimits limits;
  limits.warn_seconds = 0.2;
  limits.fail_seconds = 0.6;
  const Groups groups = Connected(2, limits);
  SharedChannel* channel = ChannelOf(groups[0].get(), "alone");
  ASSERT_TRUE(channel->Post({SharedOperation::kAllGather, 4, {}, 0, {}}).ok());
  EXPECT_FALSE(channel->Arrived());
  const Status status = channel->Wait();
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("for rank 1 in collective 'alone'"), std::string::npos) << status.message();
}

TEST(SharedGroupTest, ARankThatHasEndedIsNotWaitedFor) {
  auto mine = SharedGroup::Create(0, 2, {});
  ASSERT_TRUE(mine.ok());
  int pipes[2], go[2];
  ASSERT_EQ(pipe(pipes), 0);
  ASSERT_EQ(pipe(go), 0);
  const pid_t child = fork();
  if (child == 0) {
    auto theirs = SharedGroup::Create(1, 2, {});
    const SharedAddress address = theirs.value()->address();
    char byte;
    const bool told = write(pipes[1], &address, sizeof(address)) == sizeof(address) && read(go[0], &byte, 1) == 1;
    _exit(told ? 0 : 1);
  }
  SharedAddress address;
  ASSERT_EQ(read(pipes[0], &address, sizeof(address)), static_cast<ssize_t>(sizeof(address)));
  const std::vector<SharedAddress> addresses = {mine.value()->address(), address};
  ASSERT_TRUE(mine.value()->Connect(addresses).ok());
  ASSERT_EQ(write(go[1], "x", 1), 1);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  SharedChannel* channel = ChannelOf(mine.value().get(), "gone");
  ASSERT_TRUE(channel->Post({SharedOperation::kAllGather, 4, {}, 0, {}}).ok());
  const Status status = channel->Wait();
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("has ended"), std::string::npos) << status.message();
  // Nor can a rank that is gone be joined.
  auto late = SharedGroup::Create(0, 2, {});
  EXPECT_EQ(late.value()->Connect(addresses).code(), StatusCode::kFailedPrecondition);
}

TEST(SharedGroupTest, AnotherProcessIsNotTakenForARank) {
  auto first = SharedGroup::Create(0, 2, {});
  auto second = SharedGroup::Create(1, 2, {});
  std::vector<SharedAddress> addresses = {first.value()->address(), second.value()->address()};
  ++addresses[1].token;
  const Status status = first.value()->Connect(addresses);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("is not rank 1"), std::string::npos) << status.message();
}

TEST(SharedGroupTest, TheChannelsThreadRunsTasks) {
  const Groups groups = Connected(1);
  SharedChannel* channel = ChannelOf(groups[0].get(), "later");
  std::atomic<int> runs{0};
  for (int i = 0; i < 3; ++i) {
    channel->Later([&runs] { ++runs; });
    while (runs != i + 1) std::this_thread::yield();
  }
}

}  // namespace
}  // namespace hvd_ctr
