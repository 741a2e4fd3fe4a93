#include "bench/moe/moe_report.h"

#include <utility>

#include <fmt/format.h>

namespace nibble {

namespace {

Json layer_json(const MoeShape& shape) {
  const std::string note = shape.rows_note();
  return Json::object(
      {{"name", shape.name},
       {"experts", shape.experts},
       {"all_experts", shape.all_experts},
       {"top_k", shape.top_k},
       {"hidden", shape.hidden},
       {"width", shape.width},
       {"activation",
        shape.activation == GemmInput::Kind::kClampedSwiglu ? "clamped_swiglu" : "silu"},
       {"biases", shape.biases},
       {"note", note.empty() ? Json() : Json(note)}});
}

Json timing_json(const MoeTiming& timing) {
  return Json::object({{"scheme", timing.scheme},
                       {"kernel", timing.kernel},
                       {"m", timing.m},
                       {"rows", timing.rows},
                       {"slots", timing.slots},
                       {"active_experts", timing.load.active},
                       {"expert_rows_max", timing.load.most},
                       {"expert_rows_mean", timing.load.mean},
                       {"us", timing.us.median},
                       {"us_p25", timing.us.p25},
                       {"us_p75", timing.us.p75},
                       {"active_bytes", timing.active_bytes},
                       {"copies", timing.copies},
                       {"gbps", timing.gbps},
                       {"read_gbps", timing.read_gbps},
                       {"read_percent", timing.read_percent.median},
                       {"read_percent_p25", timing.read_percent.p25},
                       {"read_percent_p75", timing.read_percent.p75},
                       {"tflops", timing.tflops},
                       {"kernel_launches", timing.launches ? Json(*timing.launches) : Json()}});
}

}  // namespace

Json moe_report_json(const MoeReport& report, const MoeBenchOptions& options) {
  JsonArray runs;
  for (const MoeTiming& timing : report.timings) {
    runs.push_back(timing_json(timing));
  }
  return Json::object({{"backend", report.backend},
                       {"threads", report.threads},
                       {"layer", layer_json(options.shape)},
                       {"routing", routing_name(options.routing)},
                       {"seed", options.seed},
                       {"ceilings", Json::object({{"read_gbps", report.read_gbps}})},
                       {"runs", std::move(runs)}});
}

std::string moe_timing_head() {
  return fmt::format(
      "{:16} {:26} {:>6} {:>6} {:>6} {:>7} {:>8} {:>10} {:>8} {:>8} {:>6} {:>8} {:>8}", "scheme",
      "kernel", "m", "rows", "active", "most", "mean", "us", "MB", "GB/s", "read %", "TFLOPS",
      "launches");
}

std::string moe_timing_line(const MoeTiming& t) {
  return fmt::format(
      "{:16} {:26} {:6} {:6} {:6} {:7} {:8.1f} {:10.1f} {:8.1f} {:8.1f} {:6.1f} {:8.2f} {:>8}",
      t.scheme, t.kernel, t.m, t.rows, t.load.active, t.load.most, t.load.mean, t.us.median,
      static_cast<double>(t.active_bytes) / 1e6, t.gbps, t.read_percent.median, t.tflops,
      t.launches ? fmt::format("{:.0f}", *t.launches) : "none");
}

}  // namespace nibble
