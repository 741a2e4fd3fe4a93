#include "backend/cpu/isa.h"

#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/ranges.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/cpu/kernel_families.h"
#include "base/log.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace nibble::cpu {
namespace {

#if defined(__x86_64__)

constexpr bool bit(unsigned value, int index) { return (value >> index & 1U) != 0; }

/// Register states that the operating system saves (XCR0): bits 1 and 2 for SSE and AVX, 5 to 7
/// for the AVX-512 masks and registers.
unsigned saved_states() {
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

/// Asks Linux for the tile registers, which a process gets on demand only; errno, or 0.
int request_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // the state's number in XCR0
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
}

CpuFeatures detect() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  CpuFeatures features;
  if (__get_cpuid(0, &a, &b, &c, &d) != 0) {
    features.fetch_far = c != signature_AMD_ecx;
  }
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || !bit(c, 27)) {  // no OSXSAVE
    return features;
  }
  const bool fma = bit(c, 12);
  const bool f16c = bit(c, 29);
  const bool avx = bit(c, 28);
  const unsigned states = saved_states();
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) {
    return features;
  }
  features.avx2 = avx && fma && f16c && bit(b, 5) && (states & 0x06U) == 0x06U;
  const bool foundation = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F, DQ, BW, VL
  features.avx512 = features.avx2 && foundation && (states & 0xe6U) == 0xe6U;
  features.avx512_vnni = features.avx512 && bit(c, 11);
  const bool tiles = bit(d, 22) && bit(d, 24) && bit(d, 25);  // AMX-BF16, -TILE, -INT8
  const bool byte_tables = bit(c, 1);                         // AVX512-VBMI
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) {
    features.avx2_vnni = features.avx2 && bit(a, 4);
  }
  if (tiles && byte_tables && features.avx512_vnni) {
    features.amx_refusal = request_tiles();
    features.amx = features.amx_refusal == 0;
  }
  return features;
}

#else

CpuFeatures detect() { return {}; }

#endif

/// Slowest first.
const std::array<KernelTable, 6>& tables() {
  static const std::array<KernelTable, 6> all = {{
      {scalar::kGemm, scalar::kRows, scalar::kAttention, TileKernels{}, "scalar"},
      {avx2::kGemm, avx2::kRows, avx2::kAttention, TileKernels{}, "avx2"},
      {avx2_vnni::kGemm, avx2_vnni::kRows, avx2_vnni::kAttention, TileKernels{}, "avx2_vnni"},
      {avx512_bw::kGemm, avx512_bw::kRows, avx512_bw::kAttention, TileKernels{}, "avx512_bw"},
      {avx512::kGemm, avx512::kRows, avx512::kAttention, TileKernels{}, "avx512"},
      // Products of few rows take vectors, as with AVX-512.
      {avx512::kGemm, amx::kRows, amx::kTileAttention, amx::kTiles, "amx"},
  }};
  return all;
}

struct Choice {
  const KernelTable* table;
  bool supported;
};

std::array<Choice, 6> choices(const CpuFeatures& features) {
  const auto or_stand_in = [](const KernelTable& table, bool supported, const KernelTable* other) {
    return supported || other == nullptr ? Choice{&table, supported} : Choice{other, true};
  };
  const StandIns& others = features.stand_ins;
  const auto& [scalar, avx2, avx2_vnni, avx512_bw, avx512, amx] = tables();
  return {Choice{&scalar, true},
          Choice{&avx2, features.avx2},
          Choice{&avx2_vnni, features.avx2_vnni},
          Choice{&avx512_bw, features.avx512},
          or_stand_in(avx512, features.avx512_vnni, others.avx512),
          or_stand_in(amx, features.amx, others.amx)};
}

/// Asked once: in a virtual machine every cpuid instruction leaves it, for ten microseconds.
CpuFeatures& detected() {
  static CpuFeatures features = detect();
  return features;
}

}  // namespace

CpuFeatures detect_cpu_features() { return detected(); }

void set_stand_ins(const StandIns& stand_ins) { detected().stand_ins = stand_ins; }

std::vector<std::string_view> supported_isas(const CpuFeatures& features) {
  std::vector<std::string_view> names;
  for (const Choice& choice : choices(features)) {
    if (choice.supported) {
      names.emplace_back(choice.table->name);
    }
  }
  return names;
}

void log_missing(const CpuFeatures& features, std::string_view chosen) {
  if (features.amx_refusal != 0) {
    NIBBLE_LOG(kWarning,
               "the operating system refuses this processor's AMX ({}): using the {} kernels",
               std::strerror(features.amx_refusal), chosen);
  }
  if (!features.avx2) {
    NIBBLE_LOG(kWarning, "this processor has no AVX2: using the {} kernels, which are slow",
               chosen);
  }
}

Result<const KernelTable*> find_kernels(std::string_view isa, const CpuFeatures& features) {
  const KernelTable* best = nullptr;
  for (const Choice& choice : choices(features)) {
    if (isa == choice.table->name) {
      if (choice.supported) {
        return choice.table;
      }
      return make_error(StatusCode::kUnsupported,
                        "this machine cannot run the {} kernels; it has {}: choose one of these or "
                        "auto",
                        isa, fmt::join(supported_isas(features), ", "));
    }
    if (choice.supported) {
      best = choice.table;
    }
  }
  if (isa == "auto") {
    return best;
  }
  return make_error(StatusCode::kInvalidArgument,
                    "unknown instruction set \"{}\"; this machine has {}: choose one of these or "
                    "auto",
                    isa, fmt::join(supported_isas(features), ", "));
}

}  // namespace nibble::cpu
