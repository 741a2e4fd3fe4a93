// Windows of a text on a device: Windows where Parts::math is given.

#include <algorithm>

#include "base/check.h"
#include "base/log.h"
#include "base/process.h"
#include "calibration/windows.h"

namespace nibble {
namespace {

/// What rounding matrices takes of the host beside the states: weights of two pieces (2^25), as F32
/// in page-locked memory, and of one as values three times, encoded chunks, and what the layers'
/// source maps.
constexpr int64_t kRoundingRoom = int64_t{1} << 30;

}  // namespace

Status Windows::open_device() {
  const DeviceStates::Parts parts{.runner = parts_.runner,
                                  .math = *parts_.math,
                                  .windows = std::ssize(parts_.tokens),
                                  .rows = rows()};
  const int64_t needed = DeviceStates::bytes(parts, DeviceStates::Place::kMemory);
  const bool fits = rss_bytes() + needed + kRoundingRoom <= parts_.context.memory;
  if (!fits) {
    NIBBLE_LOG(kInfo,
               "calibration: hidden states of {} MiB are kept in files; --memory of {} MiB or more "
               "keeps them in memory",
               needed >> 20, (rss_bytes() + needed + kRoundingRoom) >> 20);
  }
  NIBBLE_ASSIGN_OR_RETURN(device_, DeviceStates::create(parts, fits ? DeviceStates::Place::kMemory
                                                                    : DeviceStates::Place::kFiles));
  return {};
}

Status Windows::for_each_on_device(const Pass& pass) {
  CHECK(!pass.before && !pass.after);
  const auto kept = [&](const std::vector<Kept>& all) {
    std::vector<Kept> some;
    std::ranges::copy_if(all, std::back_inserter(some), [&](Kept what) { return keeps(what); });
    return some;
  };
  const std::vector<Kept> reads = kept(pass.reads);
  const std::vector<Kept> writes = kept(pass.writes);
  CHECK(reads.size() == 1 && writes.size() <= 1);
  device_->begin(&files_[file(reads.front())],
                 writes.empty() ? nullptr : &files_[file(writes.front())]);
  return pass_through(
      Fetched::kYes,
      writes.empty() ? DeviceStates::Outcome::kDropped : DeviceStates::Outcome::kKept,
      [&](std::span<const int32_t> tokens) { parts_.runner.run(tokens, pass.run); });
}

Status Windows::pass_through(Fetched reads, DeviceStates::Outcome outcome, const DeviceWork& work) {
  const PartTimes::Clock::time_point begin = PartTimes::Clock::now();
  const int64_t count = std::ssize(parts_.tokens);
  const auto fetch = [&](int64_t window) {
    return reads == Fetched::kYes && window < count ? device_->fetch(window) : Status();
  };
  Status status = fetch(0);
  for (int64_t window = 0; window < count && status.ok(); ++window) {
    status = parts_.context.stop != nullptr && *parts_.context.stop
                 ? make_error(StatusCode::kCancelled, "stopped")
                 : fetch(window + 1);
    status = status.ok() ? device_->enter(window) : status;
    if (status.ok()) {
      work(parts_.tokens[static_cast<size_t>(window)]);
      device_->leave(window, outcome);
    }
  }
  const Status settled = device_->settle();
  const DeviceSeconds seconds = parts_.math->take_seconds();
  PartTimes& times = parts_.times;
  const double whole = std::chrono::duration<double>(PartTimes::Clock::now() - begin).count();
  times.add(CalibrationPart::kForward, seconds.forward);
  times.add(CalibrationPart::kSums, seconds.sums);
  times.add(CalibrationPart::kStates, std::max(0.0, whole - seconds.forward - seconds.sums));
  return status.ok() ? settled : status;
}

Status Windows::save_states() {
  StateFile& to = files_[file(Kept::kOutput)];
  for (int64_t window = 0; window < std::ssize(parts_.tokens); ++window) {
    NIBBLE_RETURN_IF_ERROR(to.write(window, device_->slab(window)));
  }
  return {};
}

Status Windows::restore_states() {
  if (device_ == nullptr || !device_->in_memory()) {
    return {};
  }
  const StateFile& from = files_[file(Kept::kInput)];
  for (int64_t window = 0; window < std::ssize(parts_.tokens); ++window) {
    NIBBLE_RETURN_IF_ERROR(from.read(window, device_->slab(window)));
  }
  return {};
}

}  // namespace nibble
