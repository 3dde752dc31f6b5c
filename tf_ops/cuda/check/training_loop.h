// A training loop without a model: plans on the host by the real MixCache, misses over the bus, a stand-in for the dense model on
// the compute stream. Run with the next batch prefetched by another thread and without, it shows how much of planning and moving
// rows is hidden, and that both give the same rows.
#ifndef HVD_CTR_CUDA_CHECK_TRAINING_LOOP_H_
#define HVD_CTR_CUDA_CHECK_TRAINING_LOOP_H_

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tf_ops/core/host_store.h"
#include "tf_ops/core/mix_cache.h"
#include "tf_ops/cuda/check/bench_device.h"
#include "tf_ops/cuda/check/bench_runner.h"
#include "tf_ops/cuda/check/report.h"

namespace hvd_ctr {

/// Batches of `rows` keys of one table. Most are the same in each batch and stay cached; `misses` of them come round again only
/// after they were evicted.
struct LoopBatches {
  static constexpr int32_t kDim = 64;
  static constexpr int64_t kKept = 4;   ///< Batches whose missed rows the cache has room for.
  static constexpr int64_t kRound = 8;  ///< Batches after which missed keys come again: then they are in the host store.

  int64_t rows = 0;
  int64_t misses = 0;

  ReceivedKeys At(int64_t batch) const;
  MixCacheOptions Options() const;
};

/// Prefetches batch after batch on a thread of its own, at most one that was not taken yet.
class Prefetcher {
 public:
  Prefetcher(MixCache* cache, const LoopBatches& batches, int64_t first, int64_t last, TaskRunner* runner);
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;
  ~Prefetcher();
  Status Take(int64_t* ticket);

 private:
  void Work(int64_t first, int64_t last);

  MixCache* const cache_;
  const LoopBatches batches_;
  TaskRunner* const runner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<int64_t> ready_;
  Status status_;
  bool stop_ = false;
  std::thread thread_;
};

/// Times of one step in the steady state, milliseconds.
struct LoopTimes {
  double prefetch = 0.0;    ///< Plan, write-backs, loads and the lookup, alone.
  double compute = 0.0;     ///< The stand-in and the update, alone.
  double serial = 0.0;      ///< One after the other.
  double overlapped = 0.0;  ///< With the next batch prefetched meanwhile.

  /// Of the time that prefetching takes, the part that does not lengthen the step.
  double hidden() const { return std::clamp((serial - overlapped) / std::max(prefetch, 1e-9), 0.0, 1.0); }
};

/// gradients = half the rows.
struct HalfKernel {
  int64_t count;
  const float* rows;
  float* gradients;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t i = ThreadIndex(block, thread);
    if (i < count) gradients[i] = 0.5f * rows[i];
  }
};

template <typename Runtime>
class TrainingLoop {
 public:
  TrainingLoop(const BenchDevice<Runtime>& device, const LoopBatches& batches)
      : device_(device),
        batches_(batches),
        runner_(device.sizes.threads, device.stream),
        prefetch_runner_(device.sizes.threads, nullptr) {}
  TrainingLoop(const TrainingLoop&) = delete;
  TrainingLoop& operator=(const TrainingLoop&) = delete;
  ~TrainingLoop() {
    for (const Event event : done_) device_.runtime.DestroyEvent(event);
  }

  Status Run(LoopTimes* times) {
    HVD_CTR_RETURN_IF_ERROR(rows_.Allocate(floats()));
    HVD_CTR_RETURN_IF_ERROR(gradients_.Allocate(floats()));
    HVD_CTR_RETURN_IF_ERROR(Calibrate());
    std::vector<float> serial, overlapped;
    HVD_CTR_RETURN_IF_ERROR(RunSerial(times, &serial));
    HVD_CTR_RETURN_IF_ERROR(RunOverlapped(times, &overlapped));
    if (std::memcmp(serial.data(), overlapped.data(), serial.size() * sizeof(float)) == 0) return Status::Ok();
    return MakeStatus(StatusCode::kInternal,
                      "MISMATCH: rows after training with the next batch prefetched differ from those after "
                      "training one batch after the other, at ",
                      batches_.misses, " misses of ", batches_.rows, " rows");
  }

 private:
  static constexpr int64_t kWarmSteps = LoopBatches::kRound + 2;

  int64_t floats() const { return batches_.rows * LoopBatches::kDim; }
  int64_t last() const { return kWarmSteps + device_.sizes.loop_steps; }

  /// Short launches, as a model's are, so that rows can be moved in between.
  Status Calibrate() {
    const int64_t threads = device_.sizes.timed ? 1 << 18 : 512;
    HVD_CTR_RETURN_IF_ERROR(busy_.Allocate(threads));
    HVD_CTR_RETURN_IF_ERROR(device_.runtime.Zero(busy_.data(), threads * 4, device_.stream));
    busy_rounds_ = 1000;
    busy_launches_ = 1;
    StreamTimer<Runtime> timer(device_.runtime, device_.stream, device_.sizes.repeats);
    double seconds = 0.0;
    HVD_CTR_RETURN_IF_ERROR(timer.Seconds([this] { return Busy(); }, &seconds));
    constexpr double kLaunchSeconds = 5e-5;
    busy_rounds_ = std::clamp(static_cast<int32_t>(1000 * kLaunchSeconds / seconds), 1, 1 << 24);
    busy_launches_ = std::max(1, static_cast<int>(device_.sizes.compute_ms * 1e-3 / kLaunchSeconds));
    if (!device_.sizes.timed) busy_rounds_ = 1;
    return Status::Ok();
  }

  Status Busy() {
    for (int i = 0; i < busy_launches_; ++i) {
      HVD_CTR_RETURN_IF_ERROR(device_.runtime.Launch("stand-in for a model", OverItems(busy_.size()),
                                                     BusyKernel{busy_.data(), busy_.size(), busy_rounds_}, device_.stream));
    }
    return Status::Ok();
  }

  Result<std::unique_ptr<MixCache>> MakeCache() const {
    const MixCacheOptions options = batches_.Options();
    auto store = MakeHostStore(options);
    if (!store.ok()) return store.status();
    return MakeMixCache(options, device_.make_backend(), std::move(store.value()));
  }

  Status LookUp(MixCache* cache, int64_t ticket) { return cache->Lookup(ticket, rows_.data(), &runner_); }

  Status Train(MixCache* cache, int64_t ticket) {
    HVD_CTR_RETURN_IF_ERROR(device_.runtime.Launch("gradients", OverItems(floats()),
                                                   HalfKernel{floats(), rows_.data(), gradients_.data()}, device_.stream));
    HVD_CTR_RETURN_IF_ERROR(Busy());
    return cache->Apply(ticket, gradients_.data(), 1.0f, &runner_);
  }

  Status RunSerial(LoopTimes* times, std::vector<float>* rows) {
    auto cache = MakeCache();
    HVD_CTR_RETURN_IF_ERROR(cache.status());
    std::vector<double> prefetch, compute, step;
    int64_t misses_before = 0;
    for (int64_t batch = 0; batch < last(); ++batch) {
      const ReceivedKeys received = batches_.At(batch);
      if (batch == kWarmSteps) misses_before = cache.value()->Stats().tables[0].misses;
      const double begin = WallSeconds();
      int64_t ticket = 0;
      HVD_CTR_RETURN_IF_ERROR(cache.value()->Prefetch(received, &ticket, &prefetch_runner_));
      HVD_CTR_RETURN_IF_ERROR(LookUp(cache.value().get(), ticket));
      HVD_CTR_RETURN_IF_ERROR(device_.runtime.Synchronize(device_.stream));
      const double ready = WallSeconds();
      HVD_CTR_RETURN_IF_ERROR(Train(cache.value().get(), ticket));
      HVD_CTR_RETURN_IF_ERROR(device_.runtime.Synchronize(device_.stream));
      const double done = WallSeconds();
      if (batch < kWarmSteps) continue;
      prefetch.push_back(ready - begin);
      compute.push_back(done - ready);
      step.push_back(done - begin);
    }
    times->prefetch = 1e3 * Median(prefetch);
    times->compute = 1e3 * Median(compute);
    times->serial = 1e3 * Median(step);
    const int64_t missed = cache.value()->Stats().tables[0].misses - misses_before;
    if (missed != batches_.misses * device_.sizes.loop_steps) {
      return MakeStatus(StatusCode::kInternal, "MISMATCH: ", missed, " misses in ", device_.sizes.loop_steps, " steps of ",
                        batches_.misses, " misses each");
    }
    return ReadRows(cache.value().get(), rows);
  }

  Status RunOverlapped(LoopTimes* times, std::vector<float>* rows) {
    auto cache = MakeCache();
    HVD_CTR_RETURN_IF_ERROR(cache.status());
    for (Event& event : done_) {
      if (event.handle == nullptr) HVD_CTR_RETURN_IF_ERROR(device_.runtime.NewEvent(&event));
    }
    std::vector<double> step;
    {
      Prefetcher prefetcher(cache.value().get(), batches_, 0, last(), &prefetch_runner_);
      double before = WallSeconds();
      for (int64_t batch = 0; batch < last(); ++batch) {
        int64_t ticket = 0;
        HVD_CTR_RETURN_IF_ERROR(prefetcher.Take(&ticket));
        HVD_CTR_RETURN_IF_ERROR(LookUp(cache.value().get(), ticket));
        HVD_CTR_RETURN_IF_ERROR(Train(cache.value().get(), ticket));
        // As TensorFlow does, the host gives the device the next step before this one is done.
        HVD_CTR_RETURN_IF_ERROR(device_.runtime.Record(done_[batch % 2], device_.stream));
        if (batch > 0) HVD_CTR_RETURN_IF_ERROR(device_.runtime.Synchronize(done_[(batch - 1) % 2]));
        const double now = WallSeconds();
        if (batch > kWarmSteps) step.push_back(now - before);
        before = now;
      }
    }
    HVD_CTR_RETURN_IF_ERROR(device_.runtime.Synchronize(device_.stream));
    times->overlapped = 1e3 * Median(step);
    return ReadRows(cache.value().get(), rows);
  }

  /// Rows of a whole round: cached ones and those in the host store.
  Status ReadRows(MixCache* cache, std::vector<float>* rows) {
    for (int64_t batch = 0; batch < LoopBatches::kRound; ++batch) {
      std::vector<float> part;
      HVD_CTR_RETURN_IF_ERROR(cache->Read(batches_.At(batch), rows_.data(), &runner_));
      HVD_CTR_RETURN_IF_ERROR(rows_.Download(0, floats(), &part, device_.stream));
      rows->insert(rows->end(), part.begin(), part.end());
    }
    return Status::Ok();
  }

  const BenchDevice<Runtime>& device_;
  const LoopBatches batches_;
  BenchRunner runner_;
  BenchRunner prefetch_runner_;
  DeviceArray<float, Runtime> rows_{device_.runtime}, gradients_{device_.runtime}, busy_{device_.runtime};
  Event done_[2];  // The last two steps.
  int32_t busy_rounds_ = 0;
  int busy_launches_ = 0;
};

template <typename Runtime>
Status TimeTraining(const BenchDevice<Runtime>& device, Report* report) {
  const bool timed = device.sizes.timed;
  Table table;
  table.title = "Training loop of " + std::to_string(device.sizes.loop_rows) + " working rows of dim " +
                std::to_string(LoopBatches::kDim) +
                " per step, times of one step in ms. Prefetch: plan, write-back, load and "
                "lookup alone; hidden: the part of it that the next batch's prefetch by another thread takes off the step.";
  table.columns = {"hit rate %", "misses", "MB moved"};
  for (const char* name : {"prefetch", "compute", "one after the other", "overlapped", "hidden %"}) {
    if (timed) table.columns.push_back(name);
  }
  table.columns.push_back("same rows");
  for (const int hit_percent : {100, 99, 95, 90, 80}) {
    LoopBatches batches;
    batches.rows = device.sizes.loop_rows;
    batches.misses = batches.rows * (100 - hit_percent) / 100;
    LoopTimes times;
    HVD_CTR_RETURN_IF_ERROR(TrainingLoop<Runtime>(device, batches).Run(&times));
    const double moved_bytes = 2.0 * static_cast<double>(batches.misses) * 2 * LoopBatches::kDim * sizeof(float);
    std::vector<Cell> row = {int64_t{hit_percent}, batches.misses, Cell(moved_bytes * 1e-6, 1)};
    if (timed) {
      for (const double ms : {times.prefetch, times.compute, times.serial, times.overlapped}) row.push_back(Cell(ms, 2));
      row.push_back(Cell(100.0 * times.hidden(), 0));
    }
    row.push_back("yes");
    table.rows.push_back(std::move(row));
    if (timed && hit_percent == 95) {
      report->goals.push_back(std::string("goal at 95 % hit rate: at least 90 % of the transfer hidden: ") +
                              (times.hidden() >= 0.9 ? "met" : "NOT met"));
    }
  }
  report->tables.push_back(std::move(table));
  return Status::Ok();
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CHECK_TRAINING_LOOP_H_
