// gemm_bench: times the matrix products on the first GPU.
//   gemm_bench [--scheme a,b] [--kernel a,b] [--shape 8192x8192,..] [--m 1,16,..] [--replays 9]
//              [--a4-share 0.75] [--json FILE]

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "bench/cuda/gemm_bench.h"

namespace nibble::cuda {
namespace {

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    parts.emplace_back(text.substr(0, comma));
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
  }
  return parts;
}

Result<int64_t> positive(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) {
    return make_error(StatusCode::kInvalidArgument, "\"{}\" is not a positive number", text);
  }
  return value;
}

Status parse(std::string_view flag,
             std::string_view value,
             GemmBenchOptions& options,
             std::string& json) {
  if (flag == "--scheme") {
    for (const std::string& name : split(value)) {
      NIBBLE_ASSIGN_OR_RETURN(const QuantScheme scheme, find_scheme(name));
      options.schemes.push_back(scheme);
    }
  } else if (flag == "--kernel") {
    options.kernels = split(value);
  } else if (flag == "--json") {
    json = value;
  } else if (flag == "--replays") {
    NIBBLE_ASSIGN_OR_RETURN(const int64_t replays, positive(value));
    options.replays = static_cast<int>(replays);
  } else if (flag == "--rest") {
    options.rest = std::strtod(std::string(value).c_str(), nullptr);
  } else if (flag == "--a4-share") {
    options.a4_share = std::strtod(std::string(value).c_str(), nullptr);
  } else if (flag == "--m") {
    options.row_counts.clear();
    for (const std::string& part : split(value)) {
      NIBBLE_ASSIGN_OR_RETURN(const int64_t m, positive(part));
      options.row_counts.push_back(m);
    }
  } else if (flag == "--shape") {
    options.shapes.clear();
    for (const std::string& part : split(value)) {
      const size_t cross = part.find('x');
      if (cross == std::string::npos) {
        return make_error(StatusCode::kInvalidArgument, "\"{}\" is not NxK", part);
      }
      NIBBLE_ASSIGN_OR_RETURN(const int64_t n, positive(std::string_view(part).substr(0, cross)));
      NIBBLE_ASSIGN_OR_RETURN(const int64_t k, positive(std::string_view(part).substr(cross + 1)));
      options.shapes.push_back({n, k});
    }
  } else {
    return make_error(StatusCode::kInvalidArgument,
                      "unknown flag {}; known are --scheme, --kernel, --shape, --m, --replays, "
                      "--rest, --a4-share, --json",
                      flag);
  }
  return {};
}

Status run(int argc, char** argv) {
  GemmBenchOptions options{.entries = gemm_entries(),
                           .shapes = standard_gemm_shapes(),
                           .row_counts = standard_gemm_rows()};
  std::string json;
  if (argc % 2 == 0) {
    return make_error(StatusCode::kInvalidArgument, "every flag takes one value");
  }
  for (int i = 1; i + 1 < argc; i += 2) {
    NIBBLE_RETURN_IF_ERROR(parse(argv[i], argv[i + 1], options, json));
  }
  NIBBLE_ASSIGN_OR_RETURN(const DeviceInfo device, query_device(0));
  std::printf("# %s, %d SMs\n%s\n", device.name.c_str(), device.sms, gemm_timing_head().c_str());
  options.progress = [](const GemmTiming& t) {
    std::printf("%s\n", gemm_timing_line(t).c_str());
    std::fflush(stdout);
  };
  NIBBLE_ASSIGN_OR_RETURN(const GemmBenchReport report, bench_gemms(device, options));
  std::printf("# read ceiling %.2f TB/s\n", report.ceilings.read_tbps);
  if (!json.empty()) {
    std::ofstream file(json);
    file << gemm_bench_json(device, report).dump() << '\n';
    if (!file) {
      return make_error(StatusCode::kIo, "cannot write {}", json);
    }
  }
  return {};
}

}  // namespace
}  // namespace nibble::cuda

int main(int argc, char** argv) {
  const nibble::Status status = nibble::cuda::run(argc, argv);
  if (!status.ok()) {
    std::fprintf(stderr, "gemm_bench: %s\n", status.message().c_str());
  }
  return nibble::exit_code(status.code());
}
