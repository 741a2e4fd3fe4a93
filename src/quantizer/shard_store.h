#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/block_file.h"
#include "base/status.h"
#include "quantizer/journal.h"
#include "quantizer/plan.h"

namespace nibble {

/// The weight files of a run as they grow: "NAME.partial" in the work folder until complete, then
/// flushed and renamed to NAME. What is done goes into the journal. Thread-safe where said.
class ShardStore final {
 public:
  /// Sees what earlier runs left for these shards: complete files stay, finished tensors of others
  /// are hashed again (so that writes which a power loss took are found), everything else is to do.
  ///   records  of all jobs of the plan; those of jobs to be done are reset
  static Result<std::unique_ptr<ShardStore>> open(const QuantizePlan& plan,
                                                  const std::string& folder,
                                                  const std::vector<size_t>& shards,
                                                  Journal& journal,
                                                  std::vector<std::optional<JobRecord>>& records,
                                                  int threads);

  /// The jobs that are to be done, in order.
  [[nodiscard]] std::vector<size_t> jobs_to_do() const;
  /// Whether a job is done. Not while others finish.
  [[nodiscard]] bool done(size_t job) const { return records_[job].has_value(); }
  /// Opens the file of a shard before its first write. Thread-safe.
  Status begin(size_t shard);
  /// Writes part of an output of a job whose shard has begun, every byte once; `bytes` are in
  /// memory that BlockMemory::take() gave for their place in the file. Thread-safe.
  Status write(const PlanJob& job, size_t output, int64_t offset, std::span<std::byte> bytes);
  /// Makes what is recorded survive a kill: blocks that finished jobs share with others, too. Not
  /// while others write.
  Status flush();
  /// Records a job all of whose bytes are written; completes the file with its last one. What a
  /// block shares with jobs that are not done waits in memory: a kill loses it, and the job's hash
  /// tells the next run. Thread-safe.
  Status finish_job(size_t job, JobRecord record);

 private:
  struct Shard {
    std::unique_ptr<BlockFile> file;
    std::atomic<int64_t> missing{0};  // jobs
  };

  ShardStore(const QuantizePlan& plan,
             std::string folder,
             Journal& journal,
             std::vector<std::optional<JobRecord>>& records)
      : plan_(plan), folder_(std::move(folder)), journal_(journal), records_(records) {}
  Status open_shard(size_t shard, int threads);
  Status verify_jobs(size_t shard, int threads);
  Status finish_shard(size_t shard);

  const QuantizePlan& plan_;
  const std::string folder_;
  Journal& journal_;
  std::vector<std::optional<JobRecord>>& records_;
  std::vector<size_t> jobs_;                    // that were to be done in the beginning
  std::vector<std::unique_ptr<Shard>> shards_;  // by index; null: not of this run, or complete
  std::mutex mutex_;                            // journal, records, opening of files
};

/// Whether a complete file of this shard is in the folder, judged by its size and header.
[[nodiscard]] bool shard_complete(const QuantizePlan& plan,
                                  const std::string& folder,
                                  size_t shard);

}  // namespace nibble
