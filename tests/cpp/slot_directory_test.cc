#include "tf_ops/core/slot_directory.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>

namespace hvd_ctr {
namespace {

Slot Insert(SlotDirectory* directory, const Key& key) { return directory->Insert(key, SlotDirectory::Hash(key)); }

TEST(SlotDirectoryTest, TakesSlotsInOrderAndReusesTheLastFreedFirst) {
  SlotDirectory directory;
  ASSERT_TRUE(directory.Allocate(3).ok());
  EXPECT_EQ(directory.free_slot(0), 0);
  EXPECT_EQ(directory.free_slot(2), 2);
  EXPECT_EQ(Insert(&directory, {10, 0}), 0);
  EXPECT_EQ(Insert(&directory, {11, 0}), 1);
  EXPECT_EQ(Insert(&directory, {12, 0}), 2);
  EXPECT_EQ(directory.free_slots(), 0);
  directory.Erase(1);
  EXPECT_EQ(directory.free_slot(0), 1);
  EXPECT_FALSE(directory.occupied(1));
  EXPECT_EQ(directory.Find(Key{11, 0}), kNoSlot);
  EXPECT_EQ(Insert(&directory, {13, 0}), 1);
  EXPECT_EQ(directory.key(1), (Key{13, 0}));
  EXPECT_EQ(directory.size(), 3);
}

TEST(SlotDirectoryTest, AllSixtyThreeBitsAndTheTableTellKeysApart) {
  const int64_t top = std::numeric_limits<int64_t>::max();
  const std::vector<Key> keys = {{0, 0}, {0, 1}, {top, 0}, {top, 1}, {top - 1, 0}, {int64_t{1} << 32, 0}, {int64_t{1} << 62, 0}};
  SlotDirectory directory;
  ASSERT_TRUE(directory.Allocate(static_cast<int64_t>(keys.size())).ok());
  for (size_t i = 0; i < keys.size(); ++i) EXPECT_EQ(Insert(&directory, keys[i]), static_cast<Slot>(i));
  for (size_t i = 0; i < keys.size(); ++i) EXPECT_EQ(directory.Find(keys[i]), static_cast<Slot>(i));
  EXPECT_EQ(directory.Find(Key{(int64_t{1} << 62) + (int64_t{1} << 32), 0}), kNoSlot);
}

// Keys that all start at the last entry: the run wraps around the end, and deletion must shift across the end too.
TEST(SlotDirectoryTest, DeletionShiftsARunAcrossTheEnd) {
  std::vector<Key> keys;
  for (int64_t id = 0; keys.size() < 5; ++id) {
    const Key key{id, 0};
    if (SlotDirectory::Hash(key) >> 60 == 15) keys.push_back(key);
  }
  for (size_t erased = 0; erased < keys.size(); ++erased) {
    SlotDirectory directory;
    ASSERT_TRUE(directory.Allocate(8).ok());  // 16 entries
    for (const Key& key : keys) Insert(&directory, key);
    directory.Erase(static_cast<Slot>(erased));
    for (size_t i = 0; i < keys.size(); ++i) EXPECT_EQ(directory.Find(keys[i]), i == erased ? kNoSlot : static_cast<Slot>(i));
  }
}

TEST(SlotDirectoryTest, RandomProgramEqualsMap) {
  for (uint32_t seed = 0; seed < 10; ++seed) {
    std::mt19937_64 random(seed);
    const int64_t slots = 1 + static_cast<int64_t>(random() % 100);
    SlotDirectory directory;
    ASSERT_TRUE(directory.Allocate(slots).ok());
    std::map<std::pair<int32_t, int64_t>, Slot> model;
    for (int step = 0; step < 4000; ++step) {
      const Key key{static_cast<int64_t>(random() % 200) << (random() % 2 * 40), static_cast<int32_t>(random() % 3)};
      const auto found = model.find({key.table, key.id});
      ASSERT_EQ(directory.Find(key), found == model.end() ? kNoSlot : found->second);
      if (found != model.end() && random() % 2 == 0) {
        directory.Erase(found->second);
        model.erase(found);
      } else if (found == model.end() && directory.free_slots() > 0) {
        const Slot expected = directory.free_slot(0);
        ASSERT_EQ(Insert(&directory, key), expected);
        ASSERT_EQ(directory.key(expected), key);
        model[{key.table, key.id}] = expected;
      }
      ASSERT_EQ(directory.size(), static_cast<int64_t>(model.size()));
    }
    std::vector<Key> keys;
    std::vector<uint64_t> hashes;
    for (const auto& [key, slot] : model) {
      for (const Key& k : {Key{key.second, key.first}, Key{key.second, key.first + 7}}) {
        keys.push_back(k);
        hashes.push_back(SlotDirectory::Hash(k));
      }
    }
    std::vector<Slot> slots_found(keys.size());
    directory.Find(keys, hashes, slots_found.data());
    size_t i = 0;
    for (const auto& [key, slot] : model) {
      EXPECT_EQ(slots_found[i++], slot);
      EXPECT_EQ(slots_found[i++], kNoSlot);
    }
  }
}

TEST(SlotDirectoryTest, ReportsItsMemory) {
  SlotDirectory directory;
  ASSERT_TRUE(directory.Allocate(1000).ok());
  EXPECT_EQ(directory.allocated_bytes(), 2048 * 16 + 1000 * (16 + 4));
}

}  // namespace
}  // namespace hvd_ctr
