#include <charconv>
#include <cmath>

#include "bench/client/load_flags.h"

namespace nibble {
namespace {

Status bad(std::string_view flag, std::string_view value, std::string_view why) {
  return make_error(StatusCode::kInvalidArgument, "{} {}: {}", flag, value, why);
}

Result<double> parse_number(std::string_view flag, std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || read != end || std::isnan(value)) {
    return bad(flag, text, "is no number");
  }
  return value;
}

Result<AnswerApi> api_of(const LoadFlags& flags) {
  const std::string& endpoint = flags.endpoint;
  if (endpoint.ends_with("chat/completions") || flags.backend.ends_with("-chat") ||
      flags.dataset == "gsm8k") {
    if (!endpoint.empty() && !endpoint.ends_with("chat/completions")) {
      return bad("--endpoint", endpoint, "is no route of a chat, which the other flags ask for");
    }
    return AnswerApi::kChat;
  }
  if (!endpoint.empty() && !endpoint.starts_with('/')) {
    return bad("--endpoint", endpoint, "must begin with /, as /v1/completions does");
  }
  return flags.backend == "sglang" ? AnswerApi::kGenerate : AnswerApi::kCompletions;
}

Result<TargetOptions> target_of(const LoadFlags& flags, LoadTiming layout) {
  TargetOptions out;
  out.base_url =
      flags.base_url.empty() ? fmt::format("http://{}:{}", flags.host, flags.port) : flags.base_url;
  NIBBLE_ASSIGN_OR_RETURN(out.api, api_of(flags));
  out.endpoint = flags.endpoint;
  out.model = flags.model;
  out.api_key = flags.api_key;
  // Servers may send the role of a chat before they have a token: only text says how fast one is.
  out.timing = flags.dataset == "gsm8k" ? LoadTiming::kSglang : layout;
  out.http = {.connect_s = flags.connect_s, .stall_s = flags.stall_s};
  out.ready_s = flags.ready_s;
  for (const std::string& header : flags.headers) {
    const size_t equals = header.find('=');
    if (equals == std::string::npos || equals == 0 ||
        header.find_first_of("\r\n") != std::string::npos) {
      return bad("--header", header, "is not of the form KEY=VALUE");
    }
    out.headers.push_back({header.substr(0, equals), header.substr(equals + 1)});
  }
  if (flags.api_key.find_first_of("\r\n") != std::string::npos) {
    return make_error(StatusCode::kInvalidArgument, "--api-key: has a line break");
  }
  return out;
}

Result<BodyOptions> body_of(const LoadFlags& flags, LoadTiming layout) {
  BodyOptions out;
  const bool sglang = layout == LoadTiming::kSglang;
  out.temperature = flags.temperature;
  if (!out.temperature && (sglang || flags.dataset == "gsm8k")) {
    out.temperature = 0;
  }
  out.ignore_eos = flags.ignore_eos || (sglang && !flags.disable_ignore_eos);
  if (flags.dataset == "gsm8k") {
    out.ignore_eos = flags.ignore_eos;
  }
  if (!flags.extra_body.empty()) {
    auto extra = Json::parse(flags.extra_body);
    if (!extra.ok() || !extra->is_object()) {
      return bad("--extra-body", flags.extra_body, "is no JSON object");
    }
    out.extra = std::move(extra).value();
  }
  return out;
}

Result<ArrivalOptions> arrivals_of(const LoadFlags& flags) {
  ArrivalOptions out;
  NIBBLE_ASSIGN_OR_RETURN(out.rate, parse_rate("--request-rate", flags.request_rate));
  out.burstiness = flags.burstiness;
  out.seed = flags.seed;
  if (flags.ramp_up.empty()) {
    return out;
  }
  if (!(flags.ramp_start > 0) || !(flags.ramp_end > 0)) {
    return bad("--ramp-up-strategy", flags.ramp_up,
               "needs --ramp-up-start-rps and --ramp-up-end-rps above 0");
  }
  if (!std::isinf(out.rate)) {
    return bad("--ramp-up-strategy", flags.ramp_up, "leaves no place for a --request-rate");
  }
  out.ramp_up = flags.ramp_up == "linear" ? RampUp::kLinear : RampUp::kExponential;
  out.ramp_start = flags.ramp_start;
  out.ramp_end = flags.ramp_end;
  return out;
}

Result<Goodput> goodput_of(const std::vector<std::string>& pairs) {
  Goodput out;
  for (const std::string& pair : pairs) {
    const size_t colon = pair.find(':');
    const std::string name = pair.substr(0, colon);
    std::optional<double>* slot = nullptr;
    if (name == "ttft") {
      slot = &out.ttft;
    } else if (name == "tpot") {
      slot = &out.tpot;
    } else if (name == "e2el") {
      slot = &out.e2el;
    }
    if (slot == nullptr || colon == std::string::npos) {
      return bad("--goodput", pair, "is not ttft:MS, tpot:MS or e2el:MS");
    }
    NIBBLE_ASSIGN_OR_RETURN(*slot, parse_number("--goodput", pair.substr(colon + 1)));
  }
  return out;
}

Status read_percentiles(const LoadFlags& flags, LoadOptions& out) {
  for (const std::string& name : split_list(flags.percentile_metrics)) {
    if (name != "ttft" && name != "tpot" && name != "itl" && name != "e2el") {
      return bad("--percentile-metrics", name, "is none of ttft, tpot, itl, e2el");
    }
    out.percentile_metrics.push_back(name);
  }
  for (const std::string& text : split_list(flags.percentiles)) {
    NIBBLE_ASSIGN_OR_RETURN(const double percent, parse_number("--metric-percentiles", text));
    if (percent < 0 || percent > 100) {
      return bad("--metric-percentiles", text, "is not between 0 and 100");
    }
    out.percentiles.push_back(percent);
  }
  return {};
}

}  // namespace

std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> out;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    out.emplace_back(text.substr(0, comma));
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
  }
  return out;
}

Result<double> parse_rate(std::string_view flag, const std::string& text) {
  NIBBLE_ASSIGN_OR_RETURN(const double rate, parse_number(flag, text));
  if (!(rate > 0)) {
    return bad(flag, text, "must be above 0, or inf");
  }
  return rate;
}

Result<LoadOptions> read_load_flags(const LoadFlags& flags) {
  LoadOptions out;
  out.layout = flags.layout == "sglang" ? LoadTiming::kSglang : LoadTiming::kVllm;
  NIBBLE_ASSIGN_OR_RETURN(out.target, target_of(flags, out.layout));
  NIBBLE_ASSIGN_OR_RETURN(out.body, body_of(flags, out.layout));
  NIBBLE_ASSIGN_OR_RETURN(out.arrivals, arrivals_of(flags));
  NIBBLE_ASSIGN_OR_RETURN(out.goodput, goodput_of(flags.goodput));
  NIBBLE_RETURN_IF_ERROR(read_percentiles(flags, out));
  const std::string& semantics =
      flags.range_semantics.empty() ? flags.layout : flags.range_semantics;
  out.semantics = semantics == "sglang" ? RangeSemantics::kSglang : RangeSemantics::kVllm;
  if (!flags.sweep.empty() && !flags.compare.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--sweep and --compare exclude each other; sweep each server by itself");
  }
  if (out.target.api == AnswerApi::kChat && flags.prompt_form == "ids") {
    return bad("--prompt-form", "ids", "a chat takes text");
  }
  return out;
}

}  // namespace nibble
