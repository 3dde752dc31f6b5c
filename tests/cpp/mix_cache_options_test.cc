#include "tf_ops/core/mix_cache_options.h"

#include <limits>

#include "tests/cpp/mix_cache_fixture.h"

namespace hvd_ctr {
namespace {

struct BadOption {
  const char* expected;
  void (*spoil)(MixCacheOptions*);
};

TEST(MixCacheOptionsTest, BadOptionsAreNamed) {
  const BadOption cases[] = {
      {"dim is 0", [](MixCacheOptions* o) { o->dim = 0; }},
      {"slots is 0", [](MixCacheOptions* o) { o->slots = 0; }},
      {"slots is 1099511627776", [](MixCacheOptions* o) { o->slots = int64_t{1} << 40; }},
      {"row_type is 3; allowed: 0 (float32), 1 (float16) and 2 (bfloat16)",
       [](MixCacheOptions* o) { o->row_type = static_cast<RowType>(3); }},
      {"policy is 7", [](MixCacheOptions* o) { o->policy = static_cast<EvictionPolicyKind>(7); }},
      {"rank is 1", [](MixCacheOptions* o) { o->rank = 1; }},
      {"world_size is 0", [](MixCacheOptions* o) { o->world_size = 0; }},
      {"prefetch_wait_seconds is nan",
       [](MixCacheOptions* o) { o->prefetch_wait_seconds = std::numeric_limits<double>::quiet_NaN(); }},
      {"host.kind is 2", [](MixCacheOptions* o) { o->host.kind = static_cast<HostKind>(2); }},
      {"host.ram_bytes is -1", [](MixCacheOptions* o) { o->host.ram_bytes = -1; }},
      {"host.path is ''",
       [](MixCacheOptions* o) {
         o->host.kind = HostKind::kDisk;
         o->host.ram_bytes = 1 << 20;
       }},
      {"host.ram_bytes is 0",
       [](MixCacheOptions* o) {
         o->host.kind = HostKind::kDisk;
         o->host.path = "/tmp";
       }},
      {"number of tables is 0", [](MixCacheOptions* o) { o->tables.clear(); }},
      {"name of a table is item", [](MixCacheOptions* o) { o->tables.push_back(o->tables[0]); }},
      {"table 'item': rows is 0", [](MixCacheOptions* o) { o->tables[0].rows = 0; }},
      {"because hash_ids is set", [](MixCacheOptions* o) { o->tables[0].hash_ids = true; }},
      {"table 'item': min_count is 0", [](MixCacheOptions* o) { o->tables[0].min_count = 0; }},
      {"min_count is 16777216", [](MixCacheOptions* o) { o->tables[0].min_count = 1 << 24; }},
      {"max_idle_steps is -1", [](MixCacheOptions* o) { o->tables[0].max_idle_steps = -1; }},
      {"max_rows is -2", [](MixCacheOptions* o) { o->tables[0].max_rows = -2; }},
      {"sweep_every_steps is 0", [](MixCacheOptions* o) { o->tables[0].sweep_every_steps = 0; }},
      {"initializer.scale is inf",
       [](MixCacheOptions* o) { o->tables[0].initializer.scale = std::numeric_limits<float>::infinity(); }},
      {"optimizer.kind is 9", [](MixCacheOptions* o) { o->tables[0].optimizer.kind = static_cast<OptimizerKind>(9); }},
      {"optimizer.learning_rate is -1", [](MixCacheOptions* o) { o->tables[0].optimizer.learning_rate = -1.0f; }},
      {"optimizer.beta1 is 1", [](MixCacheOptions* o) { o->tables[0].optimizer.beta1 = 1.0f; }},
      {"optimizer.learning_rate_power is 0.5", [](MixCacheOptions* o) { o->tables[0].optimizer.learning_rate_power = 0.5f; }},
      {"1 features but 0 feature_tables", [](MixCacheOptions* o) { o->features = {"f"}; }},
      {"feature 'f' has table 1",
       [](MixCacheOptions* o) {
         o->features = {"f"};
         o->feature_tables = {1};
       }},
  };
  for (const BadOption& bad : cases) {
    MixCacheOptions options = CacheOptions(4, {Table("item")});
    options.name = "dim2";
    bad.spoil(&options);
    const auto cache = MakeMixCache(options, MakeCpuBackend(), MakeRamHostStore(4, 1));
    EXPECT_EQ(cache.status().code(), StatusCode::kInvalidArgument) << bad.expected;
    EXPECT_TRUE(Mentions(cache.status(), bad.expected)) << bad.expected << " / " << cache.status().message();
    EXPECT_TRUE(Mentions(cache.status(), "mix_cache 'dim2'")) << cache.status().message();
  }
  const auto cache = MakeMixCache(CacheOptions(4, {Table("item")}), nullptr, MakeRamHostStore(4, 1));
  EXPECT_EQ(cache.status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace hvd_ctr
