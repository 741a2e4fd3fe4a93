#include "backend/cuda/cuda_experts.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/row_kernels.h"
#include "backend/cuda/step_branch.h"
#include "base/check.h"
#include "base/f16.h"
#include "quant/codec.h"

namespace nibble::cuda {
namespace {

Status grow(DeviceBuffer& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.size()) < bytes) {
    buffer = DeviceBuffer();
    NIBBLE_ASSIGN_OR_RETURN(
        buffer, allocate_zeroed(static_cast<size_t>(bytes), "the experts' scratch memory"));
  }
  return {};
}

template <typename T>
Result<DeviceBuffer> to_device(std::span<const T> values) {
  DeviceBuffer buffer;
  if (!values.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(buffer, allocate_device(values.size_bytes(), "a vector"));
    NIBBLE_RETURN_IF_ERROR(copy_to_device(buffer.as<void>(), values.data(), values.size_bytes()));
  }
  return buffer;
}

/// A router as a sum of BF16 matrices: one where it has such numbers, else kRouterPlanes.
std::vector<uint16_t> router_planes(const QuantTensor& router) {
  const auto count = static_cast<size_t>(router.n * router.k);
  std::vector<float> rest(count);
  for (int64_t row = 0; row < router.n; ++row) {
    decode_row(router, row, rest.data() + row * router.k);
  }
  std::vector<uint16_t> planes;
  bool exact = false;
  for (int plane = 0; plane < kRouterPlanes && !exact; ++plane) {
    exact = plane == 0;
    for (float& number : rest) {
      planes.push_back(f32_to_bf16(number));
      number -= bf16_to_f32(planes.back());
      exact = exact && number == 0.0F;
    }
  }
  return planes;
}

const float* floats(const DeviceBuffer& buffer) {
  return buffer.size() > 0 ? buffer.as<float>() : nullptr;
}

using Kind = GemmInput::Kind;

/// From so many on, what experts make of a row with BF16 activations is rounded to BF16 before it
/// is weighed, as transformers does: memory then takes the time.
constexpr int64_t kManyRows = 512;

/// Tiles that are fit for both products of a layer.
TileRows cut_of_both(const TileRows& gate_up, const TileRows& down) {
  TileRows cut = gate_up.most <= down.most ? gate_up : down;
  cut.few = std::min(gate_up.few, down.few);
  return cut;
}

/// Bytes of an activation that a product reads.
int64_t bytes_of(ActFormat act) { return act == ActFormat::kBf16 ? 2 : 1; }

}  // namespace

int64_t ExpertScratch::row_bytes(int64_t top_k, int64_t hidden, int64_t width) {
  // x with the scales of its groups or blocks, gate_up, down and what belongs to a slot.
  const int64_t most = std::max(hidden, width);
  const int64_t scales = row_scales(ActFormat::kIntBlocks, most);
  return top_k * (2 * most + 4 * scales + 4 * width + 4 * hidden + 44);
}

Status ExpertScratch::reserve(const Sizes& sizes) {
  const int64_t slots = sizes.slots();
  NIBBLE_RETURN_IF_ERROR(grow(logits, sizes.rows * sizes.experts * 4));
  NIBBLE_RETURN_IF_ERROR(grow(chosen, slots * 4));
  NIBBLE_RETURN_IF_ERROR(grow(weights, slots * 4));
  NIBBLE_RETURN_IF_ERROR(grow(slot_of, slots * 4));
  NIBBLE_RETURN_IF_ERROR(grow(expert_of, slots * 4));
  NIBBLE_RETURN_IF_ERROR(grow(tiles, sizes.tiles() * static_cast<int64_t>(sizeof(ExpertTile))));
  NIBBLE_RETURN_IF_ERROR(grow(tile_count, 3 * 4));
  NIBBLE_RETURN_IF_ERROR(grow(counts, sizeof(ExpertCounts)));
  NIBBLE_RETURN_IF_ERROR(grow(x, slots * std::max(sizes.hidden, sizes.width) * 2));
  NIBBLE_RETURN_IF_ERROR(grow(x_scales, int_scale_stride(slots) * sizes.row_scales * 4));
  NIBBLE_RETURN_IF_ERROR(grow(gate_up, slots * 2 * sizes.width * 2));
  return grow(down, slots * sizes.hidden * 4);
}

CudaExperts::CudaExperts(const ExpertsRequest& request,
                         Parts parts,
                         const GemmContext& context,
                         ExpertScratch& memory)
    : form_(request.form),
      context_(context),
      memory_(memory),
      first_expert_(request.first_expert),
      experts_(std::ssize(request.experts)),
      all_experts_(request.router.n),
      max_m_(request.max_m) {
  const ExpertsRequest::Expert& first = request.experts.front();
  const auto on_device = [](ActFormat act) {
    return act == ActFormat::kFloat ? ActFormat::kBf16 : act;
  };
  gate_up_.weights = std::move(parts.gate_up.weights);
  gate_up_.blocks = std::move(parts.gate_up.blocks);
  down_.weights = std::move(parts.down.weights);
  down_.blocks = std::move(parts.down.blocks);
  gate_up_.act = on_device(form_.act.format);
  gate_up_.n = 2 * first.gate.n;
  gate_up_.k = first.gate.k;
  down_.act = on_device(form_.down_act_of(0).format);
  down_.n = first.down.n;
  down_.k = first.down.k;
  for (Side* side : {&gate_up_, &down_}) {
    side->all = dynamic_cast<const AllExpertsGemm*>(&side->weights->kernel());
  }
  activates_ = gate_up_.weights->kernel().activates() && down_.act == ActFormat::kBf16;
}

Result<std::unique_ptr<PreparedExperts>> CudaExperts::create(const ExpertsRequest& request,
                                                             Parts parts,
                                                             const GemmContext& context,
                                                             ExpertScratch& memory) {
  std::unique_ptr<CudaExperts> experts(new CudaExperts(request, std::move(parts), context, memory));
  const Side& gate_up = experts->gate_up_;
  const Side& down = experts->down_;
  if ((gate_up.all == nullptr) != (down.all == nullptr)) {
    return make_error(StatusCode::kUnsupported,
                      "experts whose products are [{}, {}] by {} and [{}, {}] by {}: one of these "
                      "kernels computes all experts, the other those that are chosen; leave "
                      "--kernel out",
                      gate_up.n, gate_up.k, gate_up.weights->kernel_name(), down.n, down.k,
                      down.weights->kernel_name());
  }
  NIBBLE_ASSIGN_OR_RETURN(experts->gate_up_.bias, to_device(request.gate_up_bias));
  NIBBLE_ASSIGN_OR_RETURN(experts->down_.bias, to_device(request.down_bias));
  NIBBLE_ASSIGN_OR_RETURN(const QuantTensor router, copy_of(request.router));
  const std::vector<uint16_t> planes = router_planes(router);
  experts->router_planes_ = static_cast<int>(std::ssize(planes) / (router.n * router.k));
  NIBBLE_ASSIGN_OR_RETURN(experts->router_, to_device(std::span<const uint16_t>(planes)));
  NIBBLE_ASSIGN_OR_RETURN(experts->router_bias_, to_device(request.router_bias));
  NIBBLE_ASSIGN_OR_RETURN(experts->correction_, to_device(request.correction));
  NIBBLE_RETURN_IF_ERROR(memory.reserve(experts->sizes()));
  return std::unique_ptr<PreparedExperts>(std::move(experts));
}

ExpertScratch::Sizes CudaExperts::sizes() const {
  ExpertScratch::Sizes sizes{.rows = max_m_,
                             .top_k = form_.top_k,
                             .experts = all_experts_,
                             .hidden = down_.n,
                             .width = down_.k,
                             .row_scales = most_row_scales()};
  if (gate_up_.all != nullptr) {
    sizes.rows = std::min(max_m_, AllExpertsGemm::most_rows(experts_));
    sizes.top_k = std::max(experts_, form_.top_k);
  }
  return sizes;
}

int64_t CudaExperts::most_row_scales() const {
  return std::max(row_scales(gate_up_.act, gate_up_.k), row_scales(down_.act, down_.k));
}

int64_t CudaExperts::Side::scales() const {
  return blocks != nullptr ? int_scale_rows(blocks->view().all, k) : row_scales(act, k);
}

Result<QuantTensor> CudaExperts::unpack(int64_t expert, ExpertPart part) const {
  return side_of(part).weights->unpack(expert);
}

Status CudaExperts::update(int64_t expert,
                           ExpertPart part,
                           int64_t first_row,
                           const QuantTensor& rows) {
  if (expert < 0 || expert >= experts_) {
    return make_error(StatusCode::kInvalidArgument, "expert {}: the layer has {}", expert,
                      experts_);
  }
  return side_of(part).weights->update(expert, first_row, rows);
}

bool CudaExperts::recordable() const {
  return gate_up_.all == nullptr || (gate_up_.all->recordable() && down_.all->recordable());
}

int64_t CudaExperts::active_bytes(int64_t experts) const {
  const int64_t present = (experts * experts_ + all_experts_ - 1) / all_experts_;
  const int64_t read = gate_up_.all != nullptr ? experts_ : present;
  return static_cast<int64_t>(router_.size()) +
         read * (gate_up_.weights->matrix_bytes() + down_.weights->matrix_bytes());
}

void CudaExperts::run(const ExpertArgs& args) {
  CHECK_LE(args.m, max_m_);
  CHECK(args.x.type == DType::kBF16 && args.x_stride == gate_up_.k);
  if (gate_up_.all != nullptr) {
    run_all(args);
    return;
  }
  const int64_t slots = args.m * form_.top_k;
  cut_tiles(args.m);
  // Results of integer activations are the same in every batch.
  const bool exact = down_.act != ActFormat::kBf16 && down_.act != ActFormat::kFp8Token;
  down_type_ = !exact && args.m >= kManyRows ? DType::kBF16 : DType::kF32;
  choose(args);
  if (args.m == 1 && gate_up_.act == ActFormat::kBf16 &&
      gate_up_.weights->kernel().takes_one_row()) {
    multiply(gate_up_, {args.x.data, GroupedRows::kOneForAll}, slots);
  } else {
    scatter(args);
    multiply(gate_up_, {memory_.x.as<void>()}, slots);
  }
  if (!activates_) {
    activate(slots);
  }
  multiply(down_, {(activates_ ? memory_.gate_up : memory_.x).as<void>()}, slots);
  combine(args, join());
}

void CudaExperts::cut_tiles(int64_t rows) {
  const int64_t slots = rows * form_.top_k;
  const int64_t of_expert = (slots + all_experts_ - 1) / all_experts_;
  cut_ = cut_of_both(gate_up_.weights->kernel().grouped_rows(of_expert, rows),
                     down_.weights->kernel().grouped_rows(of_expert, rows));
  max_tiles_ = std::min(slots, std::min(experts_, slots) + slots / cut_.most);
}

void CudaExperts::compute_logits(const ExpertArgs& args, const LaunchContext& launch) {
  must(router_logits({.x = args.x.data,
                      .router = router_.as<uint16_t>(),
                      .planes = router_planes_,
                      .bias = floats(router_bias_),
                      .rows = args.m,
                      .hidden = gate_up_.k,
                      .experts = static_cast<int32_t>(all_experts_),
                      .logits = memory_.logits.as<float>()},
                     launch),
       "a router");
}

RouteRowsArgs CudaExperts::routing(const ExpertArgs& args) const {
  return {.logits = memory_.logits.as<float>(),
          .correction = floats(correction_),
          .form = form_.router,
          .experts = static_cast<int32_t>(all_experts_),
          .top_k = static_cast<int32_t>(form_.top_k),
          .rows = args.m,
          .chosen = memory_.chosen.as<int32_t>(),
          .weights = memory_.weights.as<float>(),
          .first_expert = static_cast<int32_t>(first_expert_),
          .present = static_cast<int32_t>(experts_),
          .slot_of = memory_.slot_of.as<int32_t>()};
}

void CudaExperts::choose(const ExpertArgs& args) {
  compute_logits(args, {.stream = context_.stream});
  RouteRowsArgs route = routing(args);
  route.rows_there = context_.rows != nullptr ? context_.rows->there : nullptr;
  const bool differ = down_.blocks != nullptr && down_.blocks->view().each != nullptr;
  must(route_and_sort(route,
                      {.chosen = memory_.chosen.as<int32_t>(),
                       .experts = static_cast<int32_t>(experts_),
                       .top_k = static_cast<int32_t>(form_.top_k),
                       .rows = args.m,
                       .cut = cut_,
                       .slot_of = memory_.slot_of.as<int32_t>(),
                       .expert_of = differ ? memory_.expert_of.as<int32_t>() : nullptr,
                       .tiles = memory_.tiles.as<ExpertTile>(),
                       .tile_count = memory_.tile_count.as<int32_t>(),
                       .max_tiles = max_tiles_,
                       .slot_count = memory_.tile_count.as<int32_t>() + 2,
                       .counts = memory_.counts.as<ExpertCounts>()},
                      {context_.stream}),
       "routing");
}

LaunchContext CudaExperts::join() const {
  const bool ended = context_.branch != nullptr && context_.branch->ended();
  return ended ? context_.branch->join() : LaunchContext{.stream = context_.stream};
}

/// Experts that wait for their rows hold all multiprocessors, on which a branch of the step
/// computes while rows are routed: beside one they begin when their rows are there.
LaunchContext CudaExperts::first_launch(const Side& side) const {
  const bool beside = context_.branch != nullptr && context_.branch->runs_beside();
  return {.stream = context_.stream, .overlap = !beside || &side != &gate_up_};
}

void CudaExperts::combine(const ExpertArgs& args, const LaunchContext& launch) {
  must(combine_slots({.results = memory_.down.as<void>(),
                      .type = down_type_,
                      .slot_of = memory_.slot_of.as<int32_t>(),
                      .weights = memory_.weights.as<float>(),
                      .top_k = static_cast<int32_t>(form_.top_k),
                      .rows = args.m,
                      .n = down_.n,
                      .y = args.y,
                      .y_stride = args.y_stride,
                      .beside = args.beside},
                     launch),
       "adding experts");
}

const void* CudaExperts::round_rows(const ExpertArgs& args) {
  if (row_scales(gate_up_.act, gate_up_.k) == 0) {
    return args.x.data;
  }
  QuantizedRows out{gate_up_.act, context_.scratch.values(), context_.scratch.scales()};
  if (gate_up_.blocks != nullptr) {
    out.blocks = gate_up_.blocks->view().all;
  }
  must(quantize_rows({.x = args.x.data, .rows = args.m, .n = gate_up_.k, .out = out},
                     {context_.stream}),
       "rounding activations");
  return out.values;
}

/// Each row is rounded once, then copied to its slots.
void CudaExperts::scatter(const ExpertArgs& args) {
  const void* rows = round_rows(args);
  const bool below =  // whether the scales of a row lie below each other
      gate_up_.blocks != nullptr && gate_up_.blocks->view().all.scales == BlockScales::kEach;
  must(scatter_rows({.from = rows,
                     .scales = context_.scratch.scales(),
                     .row_scales = gate_up_.scales(),
                     .slot_of = memory_.slot_of.as<int32_t>(),
                     .top_k = static_cast<int32_t>(form_.top_k),
                     .rows = args.m,
                     .row_bytes = gate_up_.k * bytes_of(gate_up_.act),
                     .to = memory_.x.as<void>(),
                     .slot_scales = memory_.x_scales.as<float>(),
                     .scale_stride = below ? int_scale_stride(args.m) : 0,
                     .slot_scale_stride = below ? int_scale_stride(args.m * form_.top_k) : 0},
                    {context_.stream}),
       "copying rows");
}

void CudaExperts::activate(int64_t slots) {
  // Of a share of the experts, or where rows only fill a step up, the host knows no better number.
  const bool filled_up = context_.rows != nullptr && context_.rows->there != nullptr;
  const bool fewer = gate_up_.all == nullptr && (experts_ < all_experts_ || filled_up);
  const int32_t* wanted = fewer ? memory_.tile_count.as<int32_t>() + 2 : nullptr;
  const ExpertBlocks blocks = down_.blocks != nullptr ? down_.blocks->view() : ExpertBlocks();
  must(activation_quantize(
           {.x = memory_.gate_up.as<void>(),
            .kind = form_.activation,
            .rows = slots,
            .n = down_.k,
            .out = {down_.act, memory_.x.as<void>(), memory_.x_scales.as<float>(), blocks.all},
            .limit = form_.limit,
            .wanted = wanted,
            .each_blocks = blocks.each,
            .experts = memory_.expert_of.as<int32_t>()},
           {context_.stream}),
       "activation");
}

void CudaExperts::multiply(const Side& side, const Rows& x, int64_t slots) {
  const PackedMatrices& weights = *side.weights;
  const bool down = &side == &down_;
  const bool activated = activates_ && !down;
  GroupedLaunch launch = {
      .x = x.data,
      .x_scales = memory_.x_scales.as<float>(),
      .blocks = side.blocks != nullptr ? &side.blocks->view() : nullptr,
      .packed = weights.at(0),
      .expert_bytes = weights.stride(),
      .bias = floats(side.bias),
      .y = (down ? memory_.down : memory_.gate_up).as<void>(),
      .result = down && down_type_ == DType::kF32 ? GemmResult::kF32 : GemmResult::kBf16,
      .activation = activated ? form_.activation : Kind::kPlain,
      .limit = form_.limit,
      .slots = slots,
      .rows = x.rows,
      .max_tiles = max_tiles_,
      .workspace = context_.scratch.workspace()};
  LaunchContext context = first_launch(side);
  if (cut_.few > 0) {
    launch.tiles = memory_.tiles.as<ExpertTile>() + max_tiles_;
    launch.tile_count = memory_.tile_count.as<int32_t>() + 1;
    launch.tile_rows = cut_.few;
    must(weights.kernel().run_grouped(launch, context), weights.kernel_name());
    launch.beside = true;
    context = {.stream = context_.stream};
  }
  launch.tiles = memory_.tiles.as<ExpertTile>();
  launch.tile_count = memory_.tile_count.as<int32_t>();
  launch.tile_rows = cut_.most;
  must(weights.kernel().run_grouped(launch, context), weights.kernel_name());
}

void CudaExperts::run_all(const ExpertArgs& args) {
  // Kernels of the library that may wait for blocks of their own do not run beside one another.
  LaunchContext first_context = join();
  const int64_t most = AllExpertsGemm::most_rows(experts_);
  for (int64_t first = 0; first < args.m; first += most) {
    ExpertArgs part = args;
    part.m = std::min(most, args.m - first);
    part.x = args.x.at(first * args.x_stride);
    part.y = args.y + first * args.y_stride;
    part.beside = args.beside != nullptr ? args.beside + first * down_.n : nullptr;
    compute_logits(part, first_context);
    first_context = {.stream = context_.stream};
    must(route_rows(routing(part), {context_.stream}), "routing");
    must(number_slots({.chosen = memory_.chosen.as<int32_t>(),
                       .top_k = static_cast<int32_t>(form_.top_k),
                       .rows = part.m,
                       .slot_of = memory_.slot_of.as<int32_t>()},
                      {context_.stream}),
         "numbering slots");
    multiply_all(gate_up_, {.x = round_rows(part),
                            .x_scales = context_.scratch.scales(),
                            .y = memory_.gate_up.as<void>(),
                            .rows = part.m});
    activate(experts_ * part.m);
    multiply_all(down_, {.x = memory_.x.as<void>(),
                         .x_scales = memory_.x_scales.as<float>(),
                         .x_expert_rows = part.m,
                         .y = memory_.down.as<void>(),
                         .result = GemmResult::kF32,
                         .rows = part.m});
    combine(part, {.stream = context_.stream});
  }
}

void CudaExperts::multiply_all(const Side& side, AllExpertsLaunch args) {
  args.packed = side.weights->at(0);
  args.expert_bytes = side.weights->stride();
  args.bias = floats(side.bias);
  args.experts = experts_;
  must(side.all->run_all(args, {context_.stream}), side.weights->kernel_name());
}

}  // namespace nibble::cuda
