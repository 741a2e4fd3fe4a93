#include "backend/prepared_experts.h"

#include <algorithm>

#include "base/check.h"
#include "ops/route.h"

namespace nibble {
namespace {

Status check_like(const QuantView& view, const QuantView& first, int64_t expert) {
  if (view.n != first.n || view.k != first.k) {
    return make_error(StatusCode::kCorrupt,
                      "{}: expert {} has a matrix [{}, {}], the first expert [{}, {}]", view.name,
                      expert, view.n, view.k, first.n, first.k);
  }
  if (!(view.format == first.format)) {
    return make_error(StatusCode::kUnsupported,
                      "{}: expert {} is stored in another format than the first of its layer; "
                      "quantize the checkpoint again: nibble quantize SRC DST --scheme NAME",
                      view.name, expert);
  }
  return {};
}

}  // namespace

void PreparedExperts::show_rows(const ExpertView& /*view*/, ExpertObserver& /*observer*/) {
  CHECK_MSG(false, "the rows of this device's experts are not shown");
}

void PreparedExperts::add_rows(const ExpertView& /*view*/, std::span<SiteMath* const> /*sums*/) {
  CHECK_MSG(false, "this device has no sums of experts' rows");
}

Status check_experts(const ExpertsRequest& request) {
  const auto experts = std::ssize(request.experts);
  const int64_t all = request.router.n;  // that are chosen from
  if (experts < 1 || all > kMostExperts || request.form.top_k < 1 || request.form.top_k > all) {
    return make_error(StatusCode::kInvalidArgument,
                      "{} of {} experts for each token: expected at least one, at most all, of at "
                      "most {}",
                      request.form.top_k, all, kMostExperts);
  }
  const ExpertsForm& form = request.form;
  const bool one_format = std::ranges::all_of(form.down_acts, [&](const ActSpec& act) {
    return act.format == form.down_acts.front().format;
  });
  if (!one_format || (!form.down_acts.empty() && std::ssize(form.down_acts) != experts)) {
    return make_error(
        StatusCode::kInvalidArgument,
        "{} forms of the rows that down reads for {} experts: expected one in all, or "
        "one of each in a common format",
        form.down_acts.size(), experts);
  }
  const ExpertsRequest::Expert& first = request.experts.front();
  const int64_t hidden = first.gate.k;
  const int64_t width = first.gate.n;
  for (int64_t i = 0; i < experts; ++i) {
    const ExpertsRequest::Expert& expert = request.experts[static_cast<size_t>(i)];
    NIBBLE_RETURN_IF_ERROR(check_like(expert.gate, first.gate, i));
    NIBBLE_RETURN_IF_ERROR(check_like(expert.up, first.gate, i));
    NIBBLE_RETURN_IF_ERROR(check_like(expert.down, first.down, i));
  }
  const bool fits = first.down.n == hidden && first.down.k == width && request.first_expert >= 0 &&
                    request.first_expert <= all - experts && request.router.k == hidden;
  const auto has = [](std::span<const float> values, int64_t count) {
    return values.empty() || std::ssize(values) == count;
  };
  if (!fits || !has(request.router_bias, all) || !has(request.correction, all) ||
      !has(request.gate_up_bias, experts * 2 * width) ||
      !has(request.down_bias, experts * hidden)) {
    return make_error(StatusCode::kInvalidArgument,
                      "{} experts [{}, {}], the first being {}, with a router [{}, {}] and down "
                      "[{}, {}]: the shapes do not fit each other, or the biases do not fit them",
                      experts, width, hidden, request.first_expert, all, request.router.k,
                      first.down.n, first.down.k);
  }
  return {};
}

}  // namespace nibble
