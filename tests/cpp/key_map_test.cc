#include "tf_ops/core/key_map.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace hvd_ctr {
namespace {

uint64_t Hash(const Key& key) { return HashKey(key.table, key.id, kDirectorySalt); }

TEST(KeyMapTest, EmptyMapHasNothing) {
  KeyMap map;
  const Key key{5, 0};
  EXPECT_EQ(map.Find(key, Hash(key)), 0u);
  map.Erase(key, Hash(key));
  map.EraseZeros();
  EXPECT_EQ(map.size(), 0);
  EXPECT_EQ(map.allocated_bytes(), 0);
}

TEST(KeyMapTest, KeysCompareByTableAndAllBits) {
  KeyMap map;
  const std::vector<Key> keys = {{0, 0}, {0, 1}, {int64_t{1} << 40, 0}, {INT64_MAX, 0}, {INT64_MAX - 1, 0}};
  for (size_t i = 0; i < keys.size(); ++i) map.FindOrInsert(keys[i], Hash(keys[i])) = i + 1;
  for (size_t i = 0; i < keys.size(); ++i) EXPECT_EQ(map.Find(keys[i], Hash(keys[i])), i + 1);
}

TEST(KeyMapTest, ReservedRoomAllocatesNothingMore) {
  KeyMap map;
  map.Reserve(1000);
  const int64_t bytes = map.allocated_bytes();
  for (int64_t id = 0; id < 1000; ++id) map.FindOrInsert({id, 0}, Hash({id, 0})) = 1;
  EXPECT_EQ(map.allocated_bytes(), bytes);
  map.Clear();
  EXPECT_EQ(map.allocated_bytes(), 0);
  EXPECT_EQ(map.Find({1, 0}, Hash({1, 0})), 0u);
}

TEST(KeyMapTest, RandomProgramEqualsStdMap) {
  for (uint32_t seed = 0; seed < 10; ++seed) {
    std::mt19937_64 random(seed);
    KeyMap map;
    std::map<std::pair<int32_t, int64_t>, uint64_t> model;
    const uint64_t ids = 1 + random() % 300;
    for (int step = 0; step < 5000; ++step) {
      const Key key{static_cast<int64_t>(random() % ids), static_cast<int32_t>(random() % 2)};
      const uint64_t dice = random() % 100;
      if (dice < 45) {
        const uint64_t value = random() % 4;
        map.FindOrInsert(key, Hash(key)) = value;
        model[{key.table, key.id}] = value;
      } else if (dice < 60) {
        const uint64_t bits = random() % 4;
        const auto found = model.find({key.table, key.id});
        const uint64_t left = found == model.end() ? 0 : found->second & bits;
        ASSERT_EQ(map.KeepBits(key, Hash(key), bits), left);
        if (left == 0)
          model.erase({key.table, key.id});
        else
          found->second = left;
      } else if (dice < 90) {
        map.Erase(key, Hash(key));
        model.erase({key.table, key.id});
      } else if (dice == 99) {
        map.EraseZeros();
        for (auto at = model.begin(); at != model.end();) at = at->second == 0 ? model.erase(at) : std::next(at);
      }
      ASSERT_EQ(map.size(), static_cast<int64_t>(model.size()));
      const auto found = model.find({key.table, key.id});
      ASSERT_EQ(map.Find(key, Hash(key)), found == model.end() ? 0 : found->second);
    }
    std::map<std::pair<int32_t, int64_t>, uint64_t> all;
    map.ForEach([&all](const Key& key, uint64_t value) { all[{key.table, key.id}] = value; });
    EXPECT_EQ(all, model);
  }
}

}  // namespace
}  // namespace hvd_ctr
