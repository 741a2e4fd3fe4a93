#include "calibration/block_files.h"

#include <filesystem>
#include <utility>

#include "base/file.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/fmpq_sidecar.h"
#include "quantizer/model_files.h"

namespace nibble {
namespace {

FmpqSidecar sidecar_of(const BlockFiles& files) {
  const LayerJobs jobs(files.plan, files.config);
  FmpqSidecar sidecar;
  sidecar.permute = files.permuted ? FmpqPermute::kFold : FmpqPermute::kNone;
  sidecar.parts = files.parts;
  sidecar.calibration = files.calibration;
  for (const auto& [place, act] : files.acts.all()) {
    const ActSpec& spec = act.spec;
    FmpqSidecar::Site entry;
    for (const size_t job : jobs.readers(place)) {
      entry.modules.push_back(files.plan.jobs[job].name());
      sidecar.scales = block_scales_of(files.plan.jobs[job].scheme.weight, spec.format);
    }
    entry.precision = *spec.blocks;
    entry.rows = act.rows;
    sidecar.block = spec.blocks->block;
    if (spec.columns != nullptr) {
      entry.columns = *spec.columns;
      sidecar.permute = FmpqPermute::kGather;
    }
    entry.split = devices_may_split(place.site);
    sidecar.sites.push_back(std::move(entry));
  }
  return sidecar;
}

/// Says that there is a sidecar, and of gathered inputs where other programs look, so that they
/// refuse columns that they would read in a wrong order.
void announce(const FmpqSidecar& sidecar, Json& config) {
  config.set(std::string(kFmpqConfigField), fmpq_config_json(sidecar));
  const Json* stored = config.find("quantization_config");
  if (sidecar.permute != FmpqPermute::kGather || stored == nullptr) {
    return;
  }
  JsonObject groups;
  for (const auto& [name, member] : stored->find("config_groups")->as_object()) {
    Json group = member;
    const Json* activations = group.find("input_activations");
    if (activations == nullptr || activations->is_null()) {
      group.set("input_activations", Json::object({{"strategy", kFmpqGatherStrategy},
                                                   {"type", "int"},
                                                   {"num_bits", 8},
                                                   {"symmetric", true},
                                                   {"dynamic", true}}));
    }
    groups.append(name, std::move(group));
  }
  Json quantization = *stored;
  quantization.set("config_groups", std::move(groups));
  config.set("quantization_config", std::move(quantization));
}

Status replace_config(const Json& config, const std::string& folder) {
  const std::string path = fmt::format("{}/config.json", folder);
  const std::string fresh = path + ".new";
  std::error_code ignored;
  std::filesystem::remove(fresh, ignored);  // of an earlier run
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(fresh));
  NIBBLE_RETURN_IF_ERROR(file.write(config.dump_pretty() + "\n"));
  NIBBLE_RETURN_IF_ERROR(file.finish());
  return rename_file(fresh, path);
}

}  // namespace

Status write_block_files(const BlockFiles& files, const std::string& folder) {
  const FmpqSidecar sidecar = sidecar_of(files);
  NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader weights, CheckpointReader::open(folder));
  NIBBLE_RETURN_IF_ERROR(write_fmpq_sidecar(sidecar, weights, folder));
  NIBBLE_ASSIGN_OR_RETURN(Json config, read_config(folder));
  announce(sidecar, config);
  return replace_config(config, folder);
}

}  // namespace nibble
