#include "backend/cpu/cpu_experts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/cpu/numbers.h"
#include "base/check.h"
#include "base/math.h"
#include "ops/route.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kPiecesPerThread = 4;               // evens out threads that are interrupted
constexpr int64_t kResultBytes = int64_t{128} << 20;  // of the rows that are computed at a time
constexpr int64_t kFewestRows = 64;
// Reading and decoding a tile costs about as much as multiplying it with so many rows.
constexpr int64_t kTileCost = 8;

int64_t rows_at_a_time(const ExpertsRequest& request) {
  const QuantView& gate = request.experts.front().gate;
  const int64_t of_slot = 4 * (2 * gate.n + gate.k);
  return std::min(request.max_m,
                  std::max(kFewestRows, kResultBytes / (of_slot * request.form.top_k)));
}

/// A buffer of at least so many bytes; what it held is not kept.
Status grow(Buffer& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.size()) < bytes) {
    buffer = Buffer();
    NIBBLE_ASSIGN_OR_RETURN(buffer, Buffer::allocate(static_cast<size_t>(bytes)));
  }
  return {};
}

std::vector<float> copy(std::span<const float> values) { return {values.begin(), values.end()}; }

}  // namespace

Status ExpertWorkspace::reserve(const Sizes& sizes) {
  NIBBLE_RETURN_IF_ERROR(grow(rounded_, sizes.rounded));
  NIBBLE_RETURN_IF_ERROR(grow(gate_up_, sizes.gate_up));
  NIBBLE_RETURN_IF_ERROR(grow(down_, sizes.down * 4));
  NIBBLE_RETURN_IF_ERROR(grow(logits_, sizes.logits * 4));
  NIBBLE_RETURN_IF_ERROR(grow(scales_, sizes.rows * 4));
  return grow(sums_, sizes.rows * 4);
}

void ExpertWorkspace::count(const ExpertSlots& slots) {
  ExpertCounts run{.runs = 1, .active = std::ssize(slots.active())};
  for (const ExpertRows& of_expert : slots.active()) {
    run.slots += of_expert.count;
    run.rows_max = std::max(run.rows_max, of_expert.count);
  }
  counts_ += run;
}

CpuExperts::CpuExperts(const ExpertsRequest& request,
                       std::unique_ptr<PreparedGemm> router,
                       const GemmDevice& device,
                       ExpertWorkspace& memory)
    : form_(request.form),
      all_experts_(request.router.n),
      between_(request.between),
      router_(std::move(router)),
      router_bias_(copy(request.router_bias)),
      correction_(copy(request.correction)),
      kernels_(device.kernels),
      workspace_(device.workspace),
      memory_(memory),
      max_rows_(rows_at_a_time(request)),
      slots_(max_rows_,
             {.first = request.first_expert, .count = std::ssize(request.experts)},
             request.form.top_k) {
  gate_up_.bias = copy(request.gate_up_bias);
  down_.bias = copy(request.down_bias);
}

Result<std::unique_ptr<PreparedExperts>> CpuExperts::create(const ExpertsRequest& request,
                                                            Kernels kernels,
                                                            const GemmDevice& device,
                                                            ExpertWorkspace& memory) {
  std::unique_ptr<CpuExperts> experts(
      new CpuExperts(request, std::move(kernels.router), device, memory));
  NIBBLE_RETURN_IF_ERROR(
      experts->pack(experts->gate_up_, request, ExpertPart::kGateUp, kernels.gate_up, device));
  NIBBLE_RETURN_IF_ERROR(
      experts->pack(experts->down_, request, ExpertPart::kDown, kernels.down, device));
  NIBBLE_RETURN_IF_ERROR(experts->reserve());
  return std::unique_ptr<PreparedExperts>(std::move(experts));
}

Status CpuExperts::pack(Side& side,
                        const ExpertsRequest& request,
                        ExpertPart part,
                        const TiledProduct& product,
                        const GemmDevice& device) {
  const bool down = part == ExpertPart::kDown;
  const ActSpec& first = down ? form_.down_act_of(0) : form_.act;
  std::vector<std::vector<QuantView>> parts;
  for (const ExpertsRequest::Expert& expert : request.experts) {
    parts.push_back(down ? std::vector{expert.down} : std::vector{expert.gate, expert.up});
  }
  NIBBLE_ASSIGN_OR_RETURN(side.matrices, PackedMatrix::create_all(parts, first.format, device.arena,
                                                                  workspace_.pool()));
  const size_t forms = down ? std::max<size_t>(1, form_.down_acts.size()) : 1;
  side.products.reserve(forms);
  for (size_t i = 0; i < forms; ++i) {
    side.products.emplace_back(side.matrices[i], down ? form_.down_act_of(i) : first, product,
                               device);
  }
  const RowRounder& rounder = side.products.front().rounder();  // rows of all take as many bytes
  side.row_stride =
      std::max(round_up(rounder.row_bytes(), 64),
               round_up(rounder.pieces(), kSlabPieces) * 64 +
                   round_up(rounder.scaled_blocks() * static_cast<int64_t>(sizeof(float)), 64));
  return {};
}

Status CpuExperts::reserve() {
  const int64_t slots = slots_.capacity();
  NIBBLE_RETURN_IF_ERROR(
      memory_.reserve({.rounded = slots * std::max(gate_up_.row_stride, down_.row_stride),
                       .gate_up = slots * gate_up_.n() * dtype_bits(between_) / 8,
                       .down = slots * down_.n(),
                       .logits = max_rows_ * all_experts_,
                       .rows = slots}));
  // Rows of activations of a thread, and sums of tiles.
  NIBBLE_RETURN_IF_ERROR(workspace_.reserve(1, std::max(gate_up_.k(), down_.k())));
  NIBBLE_RETURN_IF_ERROR(workspace_.reserve_tiles());
  pieces_.reserve(static_cast<size_t>(workspace_.pool().threads() * kPiecesPerThread +
                                      std::ssize(gate_up_.matrices)));
  return {};
}

Result<QuantTensor> CpuExperts::unpack(int64_t expert, ExpertPart part) const {
  const Side& side = part == ExpertPart::kGateUp ? gate_up_ : down_;
  return side.matrices[static_cast<size_t>(expert)].unpack();
}

Status CpuExperts::update(int64_t expert,
                          ExpertPart part,
                          int64_t first_row,
                          const QuantTensor& rows) {
  Side& side = part == ExpertPart::kGateUp ? gate_up_ : down_;
  if (expert < 0 || expert >= std::ssize(side.matrices)) {
    return make_error(StatusCode::kInvalidArgument, "expert {}: the layer has {}", expert,
                      side.matrices.size());
  }
  PackedMatrix& matrix = side.matrices[static_cast<size_t>(expert)];
  NIBBLE_RETURN_IF_ERROR(check_update(
      {.weight = matrix.format(), .act = matrix.act(), .n = matrix.n(), .k = matrix.k()}, first_row,
      view_of(rows)));
  return matrix.update(first_row, view_of(rows), workspace_.pool());
}

int64_t CpuExperts::active_bytes(int64_t experts) const {
  const int64_t present = ceil_div(experts * std::ssize(gate_up_.matrices), all_experts_);
  return router_->weight_bytes() +
         present * (gate_up_.matrices.front().bytes() + down_.matrices.front().bytes());
}

void CpuExperts::run(const ExpertArgs& args) {
  CHECK(args.beside == nullptr);
  for (int64_t row = 0; row < args.m; row += max_rows_) {
    ExpertArgs part = args;
    part.x = args.x.at(row * args.x_stride);
    part.y = args.y + row * args.y_stride;
    part.m = std::min(max_rows_, args.m - row);
    run_rows(part);
  }
}

void CpuExperts::run_rows(const ExpertArgs& args) {
  choose(args.x, args.x_stride, args.m);
  round_inputs(args);
  multiply(gate_up_, {memory_.gate_up(), between_});
  round_results(args.m);
  multiply(down_, memory_.down());
  combine(args);
}

void CpuExperts::show_rows(const ExpertView& view, ExpertObserver& observer) {
  for (int64_t row = 0; row < view.m; row += max_rows_) {
    ExpertView part = view;
    part.x = view.x.at(row * view.x_stride);
    part.chosen_by = view.chosen_by.at(row * view.x_stride);
    part.m = std::min(max_rows_, view.m - row);
    show_part(part, row, observer);
  }
}

void CpuExperts::show_part(const ExpertView& view, int64_t before, ExpertObserver& observer) {
  choose(view.chosen_by, view.x_stride, view.m);
  const bool down = view.part == ExpertPart::kDown;
  if (down) {
    round_inputs({.x = view.x, .x_stride = view.x_stride, .m = view.m});
    multiply(gate_up_, {memory_.gate_up(), between_}, &observer);
  }
  std::vector<int64_t> row_of(static_cast<size_t>(slots_.capacity()));
  for (int64_t i = 0; i < view.m * slots_.top_k(); ++i) {
    const int64_t slot = slots_.slot_of(i / slots_.top_k(), i % slots_.top_k());
    if (slot != ExpertSlots::kDropped) {
      row_of[static_cast<size_t>(slot)] = i / slots_.top_k();
    }
  }
  const int64_t k = down ? down_.k() : gate_up_.k();
  const GemmInput activation{.kind = form_.activation, .limit = form_.limit};
  const ConstActivations results(memory_.gate_up(), between_);
  std::vector<float> rows;
  std::vector<int64_t> of;
  for (const ExpertRows& expert : slots_.active()) {
    if (!observer.wants(expert.expert)) {
      continue;
    }
    rows.resize(static_cast<size_t>(expert.count * k));
    of.assign(row_of.begin() + expert.first, row_of.begin() + expert.first + expert.count);
    for_rows(workspace_.pool(), expert.count, k, [&](int64_t i, int) {
      const ConstActivations x = down ? results.at((expert.first + i) * gate_up_.n())
                                      : view.x.at(of[static_cast<size_t>(i)] * view.x_stride);
      kernels_.make_input(
          {.x = numbers_of(x), .k = k, .input = down ? activation : GemmInput{}, .silu = {}},
          rows.data() + i * k);
    });
    std::ranges::for_each(of, [&](int64_t& row) { row += before; });
    observer.observe(expert.expert, of, rows.data());
  }
}

void CpuExperts::choose(ConstActivations x, int64_t x_stride, int64_t rows) {
  const int64_t experts = all_experts_;
  router_->run({.x = x,
                .x_stride = x_stride,
                .m = rows,
                .y = memory_.logits(),
                .y_stride = experts,
                .bias = router_bias_.empty() ? nullptr : router_bias_.data()});
  for_rows(workspace_.pool(), rows, experts * 8, [&](int64_t row, int) {
    route({.logits = {memory_.logits() + row * experts, static_cast<size_t>(experts)},
           .correction = correction_,
           .form = form_.router,
           .chosen = slots_.chosen(row),
           .weights = slots_.weights(row)});
  });
  slots_.sort(rows);
  memory_.count(slots_);
}

RoundedRows CpuExperts::rounded_rows(const Side& side, const ExpertRows& rows) {
  return {.memory = memory_.rounded() + rows.first * side.row_stride,
          .scales = memory_.scales() + rows.first,
          .sums = memory_.sums() + rows.first,
          .m = rows.count};
}

void CpuExperts::round_inputs(const ExpertArgs& args) {
  const PackedProduct& product = gate_up_.products.front();
  const RowRounder& rounder = product.rounder();
  for_rows(workspace_.pool(), args.m, rounder.k() * slots_.top_k(), [&](int64_t row, int thread) {
    RoundedRow first;  // the row as it was rounded before, not in tiles
    for (int64_t i = 0; i < slots_.top_k(); ++i) {
      if (slots_.slot_of(row, i) == ExpertSlots::kDropped) {
        continue;
      }
      const ExpertRows& rows = slots_.rows_of(slots_.chosen(row)[static_cast<size_t>(i)]);
      const RoundedRow to =
          product.row_at(rounded_rows(gate_up_, rows), slots_.slot_of(row, i) - rows.first);
      if (to.slab_stride == 0 && first.out != nullptr) {
        std::memcpy(to.out, first.out, static_cast<size_t>(rounder.row_bytes()));
        *to.scale = *first.scale;
        *to.sum = *first.sum;
        continue;
      }
      rounder.round(args.x.at(row * args.x_stride), {}, nullptr, to, thread);
      first = to.slab_stride == 0 ? to : first;
    }
  });
}

void CpuExperts::round_results(int64_t rows) {
  const GemmInput activation{.kind = form_.activation, .limit = form_.limit};
  const ConstActivations results(memory_.gate_up(), between_);
  for_rows(workspace_.pool(), rows * slots_.top_k(), 2 * down_.k(), [&](int64_t index, int thread) {
    const int64_t row = index / slots_.top_k();
    const int64_t choice = index % slots_.top_k();
    const int64_t slot = slots_.slot_of(row, choice);
    if (slot == ExpertSlots::kDropped) {
      return;
    }
    const ExpertRows& of = slots_.rows_of(slots_.chosen(row)[static_cast<size_t>(choice)]);
    const PackedProduct& product = down_.product(of.expert);
    product.rounder().round(results.at(slot * gate_up_.n()), activation, nullptr,
                            product.row_at(rounded_rows(down_, of), slot - of.first), thread);
  });
}

/// Shares of about equal cost, in the order of experts.
void CpuExperts::cut_pieces(const Side& side, const ExpertObserver* wanted) {
  constexpr int64_t kUnit = 4;  // weight tiles that a kernel likes to take at once
  const int64_t units = ceil_div(side.matrices.front().tiles(), kUnit);
  const auto cost = [&](const ExpertRows& rows) { return units * (kTileCost + rows.count); };
  int64_t total = 0;
  for (const ExpertRows& rows : slots_.active()) {
    total += cost(rows);
  }
  const int64_t pieces = workspace_.pool().threads() * kPiecesPerThread;
  pieces_.clear();
  for (const ExpertRows& rows : slots_.active()) {
    if (wanted != nullptr && !wanted->wants(rows.expert)) {
      continue;
    }
    const int64_t share = std::clamp<int64_t>(cost(rows) * pieces / total, 1, units);
    for (int64_t i = 0; i < share; ++i) {
      pieces_.push_back({rows,
                         {units * i / share * kUnit, std::min(side.matrices.front().tiles(),
                                                              units * (i + 1) / share * kUnit)}});
    }
  }
}

void CpuExperts::multiply(const Side& side, Activations y, const ExpertObserver* wanted) {
  cut_pieces(side, wanted);
  workspace_.pool().parallel_for(std::ssize(pieces_), [&](int64_t index, int thread) {
    const auto& [rows, tiles] = pieces_[static_cast<size_t>(index)];
    const auto expert = static_cast<size_t>(rows.expert);
    PackedProduct::Task task;
    task.rows = rounded_rows(side, rows);
    task.end = rows.count;
    task.output.y = y.at(rows.first * side.n());
    task.output.stride = side.n();
    task.output.bias = side.bias.empty() ? nullptr : side.bias.data() + rows.expert * side.n();
    task.thread = thread;
    side.product(rows.expert).multiply(side.matrices[expert], task, tiles);
  });
}

void CpuExperts::combine(const ExpertArgs& args) {
  const int64_t hidden = down_.n();
  for_rows(workspace_.pool(), args.m, hidden * slots_.top_k(), [&](int64_t row, int) {
    float* y = args.y + row * args.y_stride;
    for (int64_t i = 0; i < slots_.top_k(); ++i) {
      const int64_t slot = slots_.slot_of(row, i);
      if (slot != ExpertSlots::kDropped) {
        const ConstNumbers x{memory_.down() + slot * hidden, Element::kF32};
        kernels_.add_weighted(x, hidden, slots_.weights(row)[static_cast<size_t>(i)], y);
      }
    }
  });
}

}  // namespace nibble::cpu
