#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/gemm_problem.h"
#include "base/status.h"

namespace nibble {

/// Chooses from a registry of kernels: those that were asked for by name (--kernel) come first, in
/// the order of their names, then the registry's order. Counts which products took which.
class KernelChoice final {
 public:
  /// A registry as the choice sees it.
  struct Registry {
    std::string device;              // for messages: "cpu/avx512"
    std::vector<std::string> names;  // best first, each once
    size_t only_asked = 0;           // so many of the last ones are taken only where asked for
    std::function<bool(size_t entry, const GemmProblem&)> accepts;
  };

  /// kInvalidArgument, with the names of the registry, for a name that is not there.
  static Result<KernelChoice> create(Registry registry, std::span<const std::string> wanted);

  /// The entry that a product takes, or none.
  [[nodiscard]] std::optional<size_t> choose(const GemmProblem& problem) const;
  /// Notes that a matrix of a model was prepared for that entry.
  void count(size_t entry, const GemmProblem& problem);
  /// At the end of a model's products: logs how many took each kernel and forgets them.
  /// kInvalidArgument, saying what it takes and what the model has, for a name asked for that takes
  /// none of them.
  Status finish();

 private:
  KernelChoice(Registry registry, std::vector<size_t> wanted)
      : registry_(std::move(registry)), wanted_(std::move(wanted)) {}

  [[nodiscard]] Status refuse(size_t entry) const;
  /// The schemes whose products an entry multiplies.
  [[nodiscard]] std::string schemes_of(size_t entry) const;

  Registry registry_;
  std::vector<size_t> wanted_;  // entries
  // Of the products since the last finish():
  std::map<size_t, int64_t> counts_;   // by entry
  std::set<size_t> useful_;            // entries asked for that accept one of them
  std::vector<std::string> products_;  // each once: "[96, 64]" after the scheme's name
};

}  // namespace nibble
