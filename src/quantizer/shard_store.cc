#include "quantizer/shard_store.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/file.h"
#include "base/thread_name.h"

namespace nibble {
namespace {

std::string partial_path(const std::string& folder, const PlannedShard& shard) {
  return fmt::format("{}/{}.partial", folder, shard.name);
}

// Whether the bytes in the file are those that the record was made of.
Result<bool> is_intact(const PlanJob& job, const JobRecord& record, const SharedFile& file) {
  if (record.digests.size() != job.outputs.size()) {
    return false;
  }
  std::vector<std::byte> buffer;
  for (size_t output = 0; output < job.outputs.size(); ++output) {
    std::vector<Digest> digests;
    for (int64_t chunk = 0; chunk < job.chunk_count(); ++chunk) {
      const MatrixEncoder::Place place = job.place(output, chunk);
      buffer.resize(static_cast<size_t>(place.bytes));
      NIBBLE_ASSIGN_OR_RETURN(const size_t count,
                              file.read_at(job.outputs[output].offset + place.offset, buffer));
      if (count < buffer.size()) {
        return false;
      }
      digests.push_back(digest_of(buffer));
    }
    if (combine_digests(digests) != record.digests[output]) {
      return false;
    }
  }
  return true;
}

Status remove_file(const std::string& path) {
  std::error_code error;
  std::filesystem::remove(path, error);
  return error ? make_error(StatusCode::kIo, "{}: cannot remove it: {}", path, error.message())
               : Status();
}

}  // namespace

bool shard_complete(const QuantizePlan& plan, const std::string& folder, size_t shard) {
  const std::string path = fmt::format("{}/{}", folder, plan.shards[shard].name);
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  if (error || static_cast<int64_t>(bytes) != plan.shards[shard].file_bytes) {
    return false;
  }
  const auto file = MappedFile::open(path);
  const std::string header = plan.header(shard);
  return file.ok() && std::equal(header.begin(), header.end(),
                                 reinterpret_cast<const char*>(file->bytes().data()));
}

Result<std::unique_ptr<ShardStore>> ShardStore::open(const QuantizePlan& plan,
                                                     const std::string& folder,
                                                     const std::vector<size_t>& shards,
                                                     Journal& journal,
                                                     std::vector<std::optional<JobRecord>>& records,
                                                     int threads) {
  std::unique_ptr<ShardStore> store(new ShardStore(plan, folder, journal, records));
  store->shards_.resize(plan.shards.size());
  for (const size_t shard : shards) {
    NIBBLE_RETURN_IF_ERROR(store->open_shard(shard, threads));
  }
  return store;
}

Status ShardStore::open_shard(size_t shard, int threads) {
  const PlannedShard& planned = plan_.shards[shard];
  const auto known = [&](size_t job) { return records_[job].has_value(); };
  const bool all_known = std::all_of(planned.jobs.begin(), planned.jobs.end(), known);
  if (all_known && shard_complete(plan_, folder_, shard)) {
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(remove_file(fmt::format("{}/{}", folder_, planned.name)));
  const bool begun = file_exists(partial_path(folder_, planned));
  if (begun && std::any_of(planned.jobs.begin(), planned.jobs.end(), known)) {
    NIBBLE_RETURN_IF_ERROR(verify_jobs(shard, threads));
  } else {
    for (const size_t job : planned.jobs) {
      records_[job].reset();
    }
  }
  auto state = std::make_unique<Shard>();
  for (const size_t job : planned.jobs) {
    if (!known(job)) {
      jobs_.push_back(job);
      ++state->missing;
    }
  }
  shards_[shard] = std::move(state);
  if (shards_[shard]->missing == 0) {  // killed between the last tensor and the renaming
    NIBBLE_RETURN_IF_ERROR(begin(shard));
    return finish_shard(shard);
  }
  return {};
}

Status ShardStore::verify_jobs(size_t shard, int threads) {
  NIBBLE_ASSIGN_OR_RETURN(const SharedFile file,
                          SharedFile::open_locked(partial_path(folder_, plan_.shards[shard])));
  const std::vector<size_t>& jobs = plan_.shards[shard].jobs;
  std::atomic<size_t> next{0};
  std::mutex mutex;
  Status failure;
  const auto work = [&] {
    for (size_t i = next++; i < jobs.size(); i = next++) {
      std::optional<JobRecord>& record = records_[jobs[i]];
      if (!record) {
        continue;
      }
      const auto intact = is_intact(plan_.jobs[jobs[i]], *record, file);
      if (!intact.ok()) {
        const std::lock_guard lock(mutex);
        failure = intact.status();
        return;
      }
      if (!*intact) {
        record.reset();
      }
    }
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) {
    helpers.emplace_back([&work, i] {
      name_thread("check", i);
      work();
    });
  }
  work();
  for (std::thread& helper : helpers) {
    helper.join();
  }
  return failure;
}

std::vector<size_t> ShardStore::jobs_to_do() const {
  std::vector<size_t> jobs;
  std::copy_if(jobs_.begin(), jobs_.end(), std::back_inserter(jobs),
               [&](size_t job) { return !done(job); });
  return jobs;
}

Status ShardStore::begin(size_t shard) {
  const std::lock_guard lock(mutex_);
  Shard& state = *shards_[shard];
  if (state.file) {
    return {};
  }
  const PlannedShard& planned = plan_.shards[shard];
  NIBBLE_ASSIGN_OR_RETURN(
      state.file, BlockFile::open_locked(partial_path(folder_, planned), planned.file_bytes));
  const std::string header = plan_.header(shard);
  const auto bytes = static_cast<int64_t>(header.size());
  BlockMemory memory(BlockMemory::needed(bytes));
  const std::span<std::byte> staged = memory.take(0, bytes);
  std::memcpy(staged.data(), header.data(), header.size());
  return state.file->write(0, staged);
}

Status ShardStore::write(const PlanJob& job,
                         size_t output,
                         int64_t offset,
                         std::span<std::byte> bytes) {
  return shards_[job.shard]->file->write(job.outputs[output].offset + offset, bytes);
}

Status ShardStore::flush() {
  for (const auto& shard : shards_) {
    if (shard != nullptr && shard->file != nullptr) {
      NIBBLE_RETURN_IF_ERROR(shard->file->flush());
    }
  }
  return {};
}

Status ShardStore::finish_job(size_t job, JobRecord record) {
  const size_t shard = plan_.jobs[job].shard;
  {
    const std::lock_guard lock(mutex_);
    NIBBLE_RETURN_IF_ERROR(journal_.add_job(plan_.jobs[job].name(), record));
    records_[job] = std::move(record);
  }
  return --shards_[shard]->missing == 0 ? finish_shard(shard) : Status();
}

Status ShardStore::finish_shard(size_t shard) {
  const PlannedShard& planned = plan_.shards[shard];
  NIBBLE_RETURN_IF_ERROR(shards_[shard]->file->flush());
  SharedFile& file = shards_[shard]->file->file();
  NIBBLE_ASSIGN_OR_RETURN(const int64_t bytes, file.size());
  if (bytes !=
      planned.file_bytes) {  // empty tensors at the end, or rubbish that an earlier run left
    NIBBLE_RETURN_IF_ERROR(file.resize(planned.file_bytes));
  }
  NIBBLE_RETURN_IF_ERROR(file.sync());
  const std::string from = partial_path(folder_, planned);
  const std::string to = fmt::format("{}/{}", folder_, planned.name);
  const std::lock_guard lock(mutex_);
  // The records of its tensors must not be lost when the file is not.
  NIBBLE_RETURN_IF_ERROR(journal_.sync());
  NIBBLE_RETURN_IF_ERROR(rename_file(from, to));
  NIBBLE_RETURN_IF_ERROR(sync_directory(folder_));
  shards_[shard]->file.reset();
  return journal_.add_shard(planned.name);
}

}  // namespace nibble
