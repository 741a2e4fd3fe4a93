#include "backend/kernel_choice.h"

#include <algorithm>

#include <fmt/ranges.h>

#include "base/log.h"
#include "quant/scheme.h"

namespace nibble {
namespace {

constexpr size_t kMostListed = 4;  // products that a message lists

std::string text_of(const GemmProblem& problem) {
  const ActFormat act = problem.act == ActFormat::kBf16 ? ActFormat::kFloat : problem.act;
  std::string_view name = scheme_name(problem.weight, act);
  if (name.empty()) {
    name = problem.weight.quantized() ? "a format without a scheme" : "unquantized";
  }
  return fmt::format("{} [{}, {}]", name, problem.n, problem.k);
}

}  // namespace

Result<KernelChoice> KernelChoice::create(Registry registry, std::span<const std::string> wanted) {
  std::vector<size_t> entries;
  for (const std::string& name : wanted) {
    const auto found = std::ranges::find(registry.names, name);
    if (found == registry.names.end()) {
      return make_error(StatusCode::kInvalidArgument,
                        "--kernel {}: {} has no such kernel; choose from {}, or leave --kernel out",
                        name, registry.device, fmt::join(registry.names, ", "));
    }
    entries.push_back(static_cast<size_t>(found - registry.names.begin()));
  }
  return KernelChoice(std::move(registry), std::move(entries));
}

std::optional<size_t> KernelChoice::choose(const GemmProblem& problem) const {
  for (const size_t entry : wanted_) {
    if (registry_.accepts(entry, problem)) {
      return entry;
    }
  }
  for (size_t entry = 0; entry < registry_.names.size() - registry_.only_asked; ++entry) {
    if (registry_.accepts(entry, problem)) {
      return entry;
    }
  }
  return std::nullopt;
}

void KernelChoice::count(size_t entry, const GemmProblem& problem) {
  ++counts_[entry];
  for (const size_t name : wanted_) {
    if (registry_.accepts(name, problem)) {
      useful_.insert(name);
    }
  }
  std::string text = text_of(problem);
  if (std::ranges::find(products_, text) == products_.end()) {
    products_.push_back(std::move(text));
  }
}

Status KernelChoice::finish() {
  std::vector<std::string> parts;
  for (const auto& [entry, count] : counts_) {
    parts.push_back(fmt::format("{} by {}", count, registry_.names[entry]));
  }
  if (!parts.empty()) {
    NIBBLE_LOG(kInfo, "matrix products: {}", fmt::join(parts, ", "));
  }
  for (const size_t entry : wanted_) {
    if (!useful_.contains(entry)) {
      return refuse(entry);
    }
  }
  counts_.clear();
  useful_.clear();
  products_.clear();
  return {};
}

Status KernelChoice::refuse(size_t entry) const {
  const size_t listed = std::min(products_.size(), kMostListed);
  std::string products = fmt::format("{}", fmt::join(std::span(products_).first(listed), ", "));
  if (listed < products_.size()) {
    products += fmt::format(" and {} more", products_.size() - listed);
  }
  return make_error(StatusCode::kInvalidArgument,
                    "--kernel {}: it takes none of the products, which are {}; it "
                    "multiplies {}. Choose a kernel for one of these products, or leave it out",
                    registry_.names[entry], products, schemes_of(entry));
}

std::string KernelChoice::schemes_of(size_t entry) const {
  constexpr int64_t kUsual = 1024;  // channels that every scheme's groups divide
  std::vector<std::string_view> schemes;
  for (const QuantScheme& scheme : all_schemes()) {
    const ActFormat act = scheme.act == ActFormat::kFloat ? ActFormat::kBf16 : scheme.act;
    const GemmProblem dense{scheme.weight, act, kUsual, kUsual};
    GemmProblem of_experts = dense;
    of_experts.experts = 1;
    if (registry_.accepts(entry, dense) || registry_.accepts(entry, of_experts)) {
      schemes.push_back(scheme.name);
    }
  }
  return schemes.empty() ? fmt::format("no scheme on {} as it is set up", registry_.device)
                         : fmt::format("{}", fmt::join(schemes, ", "));
}

}  // namespace nibble
