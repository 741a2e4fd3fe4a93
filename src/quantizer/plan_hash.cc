#include "quantizer/plan_hash.h"

#include <cerrno>
#include <cstring>
#include <set>

#include <sys/stat.h>

#include "base/file.h"
#include "checkpoint/safetensors.h"
#include "gguf/split.h"
#include "quantizer/digest.h"

namespace nibble {
namespace {

// To be raised when the same plan gives other bytes than before, or the journal changes.
constexpr int kFormatVersion = 1;

Status add_file(const std::string& path, std::string& text) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) {
    return make_error(StatusCode::kIo, "{}: cannot examine: {}", path, std::strerror(errno));
  }
  text += fmt::format("file {} {} {}.{:09}\n", file_name(path), info.st_size, info.st_mtim.tv_sec,
                      info.st_mtim.tv_nsec);
  return {};
}

Status add_source(const CheckpointReader& reader, std::string& text) {
  std::set<std::string> files;
  for (const TensorInfo* tensor : reader.tensors()) {
    files.insert(reader.path_of(*tensor));
  }
  for (const std::string& file : files) {
    NIBBLE_RETURN_IF_ERROR(add_file(file, text));
  }
  if (!gguf::is_gguf_path(reader.path())) {  // which has its config within
    NIBBLE_RETURN_IF_ERROR(add_file(reader.path() + "/config.json", text));
  }
  return {};
}

void add_job(const PlanJob& job, std::string& text) {
  text += fmt::format("job {} {} {}\n", job.name(), job.shard,
                      job.matrix != nullptr ? job.scheme.name : std::string_view("pass"));
  for (const PlannedTensor& output : job.outputs) {
    text += fmt::format("tensor {} {} {} {}\n", output.tensor.name, dtype_name(output.tensor.dtype),
                        shape_text(output.tensor.shape), output.offset);
  }
}

}  // namespace

Result<std::string> plan_hash(const QuantizePlan& plan,
                              const CheckpointReader& reader,
                              ScaleRule rule) {
  std::string text = fmt::format("version {} rule {}\nconfig {}\n", kFormatVersion,
                                 static_cast<int>(rule), plan.quantization_config.dump());
  if (!plan.calibration.is_null()) {
    text += fmt::format("calibration {}\n", plan.calibration.dump());
  }
  if (plan.own_head) {
    text += "own head\n";
  }
  NIBBLE_RETURN_IF_ERROR(add_source(reader, text));
  Digest digest = digest_of(text);
  for (const PlanJob& job : plan.jobs) {  // a chain: the text of a whole model is long
    text = digest_text(digest);
    add_job(job, text);
    digest = digest_of(text);
  }
  return digest_text(digest);
}

Result<std::string> source_hash(const CheckpointReader& reader) {
  std::string text;
  NIBBLE_RETURN_IF_ERROR(add_source(reader, text));
  return digest_text(digest_of(text));
}

}  // namespace nibble
