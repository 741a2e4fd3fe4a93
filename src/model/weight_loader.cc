#include "model/weight_loader.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/ranges.h>

#include "arch/family.h"
#include "base/cpu_topology.h"
#include "base/f16.h"
#include "base/log.h"
#include "checkpoint/finite.h"
#include "checkpoint/gguf_matrix.h"
#include "checkpoint/kv_scales.h"
#include "model/blocks.h"
#include "model/latent_check.h"
#include "model/tensor_check.h"

namespace nibble {

namespace {

constexpr int kMostThreads = 16;  // that map experts and check their scales

float read_element(DType dtype, const std::byte* data, int64_t index) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, data + index * 4, sizeof(value));
    return value;
  }
  uint16_t half = 0;
  std::memcpy(&half, data + index * 2, sizeof(half));
  return dtype == DType::kBF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

/// The number that follows the first `text` in a name.
std::optional<int64_t> number_behind(std::string_view name, std::string_view text) {
  const size_t at = name.find(text);
  if (at == std::string_view::npos) {
    return std::nullopt;
  }
  const char* digits = name.data() + at + text.size();
  int64_t number = 0;
  const auto read = std::from_chars(digits, name.data() + name.size(), number);
  return read.ec == std::errc() && number >= 0 ? std::optional(number) : std::nullopt;
}

}  // namespace

ActFormat activations_of(const MappedLinear& part, DType model) {
  const bool bf16 = part.act.format == ActFormat::kFloat && model == DType::kBF16;
  return bf16 ? ActFormat::kBf16 : part.act.format;
}

WeightLoader::WeightLoader(std::optional<CheckpointReader> reader,
                           QuantConfig quant_config,
                           const ModelConfig& config)
    : kept_(std::make_shared<Kept>(Kept{.reader = std::move(reader), .tables = {}})),
      reader_(kept_->reader ? &*kept_->reader : nullptr),
      quant_config_(std::move(quant_config)),
      config_(config) {
  config_.family = family_as_stored(config_.family, [&](std::string_view name) {
    return reader_ != nullptr && reader_->find(name) != nullptr;
  });
}

WeightLoader WeightLoader::of_made(const std::string& path,
                                   const ModelConfig& config,
                                   WeightMaker& maker) {
  WeightLoader loader(std::nullopt, {.where = path}, config);
  loader.maker_ = &maker;
  return loader;
}

const std::vector<const TensorInfo*>& WeightLoader::tensors() const {
  static const std::vector<const TensorInfo*> kNone;
  return reader_ != nullptr ? reader_->tensors() : kNone;
}

Result<WeightLoader> WeightLoader::open(const std::string& model_dir,
                                        const ModelConfig& config,
                                        RunsFormat runs,
                                        FmpqUse fmpq) {
  NIBBLE_ASSIGN_OR_RETURN(CheckpointReader reader, CheckpointReader::open(model_dir));
  NIBBLE_ASSIGN_OR_RETURN(QuantConfig quant_config, load_quant_config(reader));
  WeightLoader loader(std::move(reader), std::move(quant_config), config);
  NIBBLE_RETURN_IF_ERROR(check_latent_tensors(*loader.reader_, loader.config_));
  loader.runs_ = std::move(runs);
  NIBBLE_ASSIGN_OR_RETURN(loader.fmpq_,
                          FmpqInputs::open(*loader.reader_, loader.quant_config_, fmpq));
  NIBBLE_RETURN_IF_ERROR(check_turned_inputs(loader.config_, loader.quant_config_.turned));
  return loader;
}

std::string WeightLoader::where_weight(const std::string& module) const {
  if (reader_ == nullptr) {
    return module;
  }
  for (const char* suffix : {".weight", ".weight_packed", ".qweight"}) {
    if (const TensorInfo* info = reader_->find(module + suffix)) {
      return reader_->where(*info);
    }
  }
  return fmt::format("{}: weights of {}", reader_->path(), module);
}

Result<MappedLinear> WeightLoader::linear(const std::string& module, int64_t n, int64_t k) {
  if (auto weights = substituted(module)) {
    return use(*std::move(weights), module, n, k);
  }
  return map(module, n, k, runs_);
}

std::optional<MappedLinear> WeightLoader::substituted(const std::string& module) const {
  const auto found = substitutes_.find(module);
  if (found == substitutes_.end()) {
    return std::nullopt;
  }
  MappedLinear weights;
  weights.weight = view_of(found->second.weight);
  weights.weight.name = module;
  weights.act = found->second.act;
  return weights;
}

void WeightLoader::substitute(const std::string& module, QuantTensor weight, const ActSpec& act) {
  substitutes_.insert_or_assign(module, Substitute{std::move(weight), act});
}

Result<MappedLinear> WeightLoader::map(const std::string& module,
                                       int64_t n,
                                       int64_t k,
                                       const RunsFormat& runs) {
  return use(maker_ != nullptr ? maker_->linear(module, n, k)
                               : map_linear_weights(*reader_, quant_config_, module, runs),
             module, n, k);
}

Result<std::vector<MappedLinear>> WeightLoader::experts(std::span<const ExpertModule> modules) {
  std::vector<MappedLinear> made;
  for (size_t i = 0; maker_ != nullptr && i < modules.size(); ++i) {
    const auto& [module, n, k] = modules[i];
    NIBBLE_ASSIGN_OR_RETURN(made.emplace_back(), linear(module, n, k));
  }
  if (maker_ != nullptr) {
    return made;
  }
  if (pool_ == nullptr) {
    pool_ = std::make_unique<ThreadPool>(std::min(kMostThreads, read_cpu_topology().usable_cpus()));
  }
  const ExpertOwner owner{
      .family = config_.family, .hidden_size = config_.hidden_size, .runs = runs_};
  std::vector<std::optional<Result<MappedLinear>>> mapped(modules.size());
  pool_->parallel_for(std::ssize(modules), [&](int64_t i, int) {
    const auto at = static_cast<size_t>(i);
    if (auto weights = substituted(modules[at].module)) {
      mapped[at] = *std::move(weights);
    } else {
      mapped[at] = map_expert_weights(*reader_, quant_config_, modules[at].module, owner);
    }
  });
  std::vector<MappedLinear> experts;
  experts.reserve(modules.size());
  for (size_t i = 0; i < modules.size(); ++i) {
    const auto& [module, n, k] = modules[i];
    NIBBLE_ASSIGN_OR_RETURN(MappedLinear weights, use(*std::move(mapped[i]), module, n, k));
    used_.insert(used_.end(), weights.tensors.begin(), weights.tensors.end());
    experts.push_back(std::move(weights));
  }
  return experts;
}

Result<MappedLinear> WeightLoader::use(Result<MappedLinear> mapped,
                                       const std::string& module,
                                       int64_t n,
                                       int64_t k) {
  NIBBLE_ASSIGN_OR_RETURN(MappedLinear weights, std::move(mapped));
  if (weights.weight.n != n || weights.weight.k != k) {
    return make_error(StatusCode::kCorrupt, "{}: shape [{}, {}], but config.json needs [{}, {}]",
                      where_weight(module), weights.weight.n, weights.weight.k, n, k);
  }
  NIBBLE_RETURN_IF_ERROR(fmpq_.apply(module, weights));
  modules_.insert(module);
  if (!weights.dropped.empty() && dropped_.insert(weights.dropped).second) {
    NIBBLE_LOG(kWarning, "{}: the {} that {} asks for is left out: activations stay as they are",
               reader_->path(), weights.dropped, quant_config_.where);
  }
  if (!weights.decoded.empty()) {
    decoded_.types.insert(weights.decoded);
    decoded_.stored_bytes += static_cast<int64_t>(weights.tensors.front()->data.size());
    decoded_.bytes += static_cast<int64_t>(weights.codes.size());
  }
  return weights;
}

Result<std::unique_ptr<SourceMatrix>> WeightLoader::block_table(const std::string& module,
                                                                int64_t n,
                                                                int64_t k) {
  const TensorInfo* tensor = reader_ == nullptr ? nullptr : reader_->find(module + ".weight");
  if (tensor == nullptr || tensor->blocks == nullptr) {
    return std::unique_ptr<SourceMatrix>();
  }
  if (tensor->shape != std::vector<int64_t>{n, k}) {
    return make_error(StatusCode::kCorrupt, "{}: shape {}, but config.json needs [{}, {}]",
                      reader_->where(*tensor), shape_text(tensor->shape), n, k);
  }
  modules_.insert(module);
  return make_gguf_source(*reader_, *tensor, module);
}

Result<QuantView> WeightLoader::table(const std::string& module, int64_t n, int64_t k) {
  const RunsFormat none = [](const WeightFormat&, int64_t) { return false; };
  NIBBLE_ASSIGN_OR_RETURN(MappedLinear weights, map(module, n, k, none));
  if (weights.weight.codes == weights.codes.data() && weights.codes.size() > 0) {
    kept_->tables.push_back(std::move(weights.codes));
  }
  if (weights.weight.format.quantized()) {
    return make_error(StatusCode::kUnsupported,
                      "{}: {} is quantized; embeddings must be F32, F16 or BF16", reader_->path(),
                      module);
  }
  return std::move(weights.weight);
}

Result<std::vector<float>> WeightLoader::vector(const std::string& tensor, int64_t n) {
  return numbers(tensor, {n});
}

Result<std::vector<float>> WeightLoader::numbers(const std::string& tensor,
                                                 const std::vector<int64_t>& shape) {
  if (maker_ != nullptr) {
    return maker_->numbers(tensor, shape);
  }
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* info, reader_->require(tensor));
  if (info->dtype != DType::kF32 && info->dtype != DType::kF16 && info->dtype != DType::kBF16) {
    return make_error(StatusCode::kUnsupported, "{}: expected F32, F16 or BF16, got {}",
                      reader_->where(*info), dtype_name(info->dtype));
  }
  if (info->shape != shape) {
    return make_error(StatusCode::kCorrupt, "{}: expected shape {}, got {}", reader_->where(*info),
                      shape_text(shape), shape_text(info->shape));
  }
  NIBBLE_RETURN_IF_ERROR(check_finite(*reader_, *info));
  std::vector<float> values(static_cast<size_t>(info->elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = read_element(info->dtype, info->data.data(), static_cast<int64_t>(i));
  }
  used_.push_back(info);
  return values;
}

Result<std::optional<KvScales>> WeightLoader::kv_scales(int64_t layer) {
  if (reader_ == nullptr) {
    return std::optional<KvScales>();
  }
  NIBBLE_ASSIGN_OR_RETURN(const StoredKvScales stored,
                          read_kv_scales(*reader_, module_name(*config_.family, Role::kKey, layer),
                                         module_name(*config_.family, Role::kValue, layer)));
  for (const TensorInfo* tensor : stored.tensors) {
    used_.push_back(tensor);
  }
  return stored.scales;
}

Result<std::string> WeightLoader::head_module() {
  std::string own = module_name(*config_.family, Role::kHead);
  if (!config_.tie_word_embeddings) {
    return own;
  }
  std::string shared = module_name(*config_.family, Role::kEmbedding);
  const bool stored = std::ranges::any_of(tensors(), [&](const TensorInfo* tensor) {
    return tensor->name.starts_with(own + ".") && !tensor->name.ends_with(".bias");
  });
  if (!stored) {
    return shared;
  }
  const TensorInfo* head = reader_->find(own + ".weight");
  const TensorInfo* table = reader_->find(shared + ".weight");
  const bool same = head != nullptr && table != nullptr && head->dtype == table->dtype &&
                    head->shape == table->shape && std::ranges::equal(head->data, table->data);
  if (same) {
    used_.push_back(head);
    return shared;
  }
  NIBBLE_LOG(kInfo,
             "{}: {} is stored and differs from the embedding, so it is used, although "
             "tie_word_embeddings is true",
             reader_->path(), own);
  NIBBLE_RETURN_IF_ERROR(linear(own, config_.vocab_size, config_.hidden_size).status());
  return own;
}

Status WeightLoader::append_bias(const std::string& module, int64_t n, std::vector<float>& bias) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<float> values, vector(module + ".bias", n));
  bias.insert(bias.end(), values.begin(), values.end());
  return {};
}

void WeightLoader::read_ahead(const std::string& module) const {
  for (const std::string_view suffix : {".weight", ".weight_packed", ".qweight", ".weight_scale"}) {
    const TensorInfo* info =
        reader_ == nullptr ? nullptr : reader_->find(module + std::string(suffix));
    if (info != nullptr) {
      reader_->read_ahead(*info);
    }
  }
}

void WeightLoader::read_ahead(int64_t layer) {
  if (reader_ == nullptr || layer >= config_.num_layers) {
    return;
  }
  if (of_layers_.empty()) {
    of_layers_ = sort_by_layer();
  }
  reader_->read_ahead(of_layers_[static_cast<size_t>(layer)]);
}

std::vector<std::vector<const TensorInfo*>> WeightLoader::sort_by_layer() const {
  std::vector<std::vector<const TensorInfo*>> layers(static_cast<size_t>(config_.num_layers));
  const std::string first = layer_prefix(*config_.family, 0);  // "model.layers.0."
  const std::string_view stem = std::string_view(first).substr(0, first.size() - 2);
  const int64_t begin = share_.first(config_.moe.experts);
  const int64_t end = begin + share_.count(config_.moe.experts);
  for (const TensorInfo* info : tensors()) {
    const std::string_view name = info->name;
    const auto layer = number_behind(name, stem);
    const auto expert = number_behind(name, ".experts.");
    const bool wanted = !expert || (*expert >= begin && *expert < end);
    if (name.starts_with(stem) && layer && *layer < config_.num_layers && wanted) {
      layers[static_cast<size_t>(*layer)].push_back(info);
    }
  }
  return layers;
}

void WeightLoader::release(std::span<const MappedLinear> parts) const {
  std::vector<const TensorInfo*> tensors;
  for (const MappedLinear& part : parts) {
    tensors.insert(tensors.end(), part.tensors.begin(), part.tensors.end());
  }
  std::ranges::sort(tensors);  // experts share theirs
  tensors.erase(std::unique(tensors.begin(), tensors.end()), tensors.end());
  if (!tensors.empty()) {
    reader_->drop_pages(tensors);
  }
}

void WeightLoader::release_all() const {
  if (reader_ != nullptr) {
    reader_->drop_all_pages();
  }
}

void WeightLoader::report_decoded() const {
  if (decoded_.types.empty()) {
    return;
  }
  constexpr double kMiB = 1 << 20;
  NIBBLE_LOG(kWarning,
             "{}: weights in {} are decoded to BF16: {:.0f} MiB of memory instead of {:.0f}. A "
             "quantized copy is smaller and faster: nibble quantize {} OUT --scheme NAME",
             reader_->path(), fmt::join(decoded_.types, ", "),
             static_cast<double>(decoded_.bytes) / kMiB,
             static_cast<double>(decoded_.stored_bytes) / kMiB, reader_->path());
}

Status WeightLoader::check_all_used() const {
  int64_t others = 0;
  std::vector<const TensorInfo*> used = used_;
  std::ranges::sort(used);
  for (const TensorInfo* info : tensors()) {
    const std::string_view name = info->name;
    const size_t dot = name.rfind('.');
    const std::string_view module = name.substr(0, dot == std::string_view::npos ? 0 : dot);
    const bool module_used = modules_.contains(module) && !name.ends_with(".bias");
    if (!module_used && !std::ranges::binary_search(used, info) &&
        !may_stay_unread(*info, config_)) {
      return unread_error(*reader_, *info);
    }
    others += of_another_model(*config_.family, name) ? 1 : 0;
  }
  if (others > 0) {
    NIBBLE_LOG(kWarning,
               "{} tensors of what reads images are left out (names that begin with {}): the model "
               "answers to text alone",
               others, fmt::join(config_.family->others, ", "));
  }
  return {};
}

}  // namespace nibble
