#pragma once

#include <optional>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "base/thread_pool.h"
#include "core/buffer.h"
#include "quant/scheme.h"

namespace nibble::cpu {

/// What the machine gives to loops that do nothing else, with all threads of a pool; best of seven.
struct Ceilings {
  double read_gbps = 0;  // 1e9 bytes a second, of memory beyond the caches in 2 MiB pages
  // 1e12 operations a second from registers, two per multiply-add; empty where the machine lacks
  // the instructions.
  std::optional<double> amx_int8_tops;
  std::optional<double> amx_bf16_tops;
  std::optional<double> vnni512_tops;  // 512-bit
  std::optional<double> vnni256_tops;
  std::optional<double> fma512_tops;  // f32
  std::optional<double> fma256_tops;

  /// The faster of the two VNNI forms.
  [[nodiscard]] std::optional<double> vnni_int8_tops() const {
    return vnni512_tops ? vnni512_tops : vnni256_tops;
  }
  /// The peak that bounds kernels of this instruction set (a name of supported_isas()) with such
  /// activations; empty where none is measured.
  [[nodiscard]] std::optional<double> peak_tops(std::string_view isa, ActFormat act) const;
};

/// Single ceilings in about 2 ms each, for use next to what is compared with them: on a machine
/// shared with others they change from one moment to the next.
class NearCeilings final {
 public:
  /// Allocates 512 MiB. The pool must outlive the object.
  static Result<NearCeilings> create(ThreadPool& pool);

  /// As Ceilings::read_gbps, from memory that the last calls did not read.
  double read_gbps();
  /// As Ceilings::peak_tops().
  std::optional<double> peak_tops(std::string_view isa, ActFormat act);

 private:
  NearCeilings(ThreadPool& pool, Buffer memory) : pool_(&pool), memory_(std::move(memory)) {}

  ThreadPool* pool_;
  Buffer memory_;
  int64_t next_ = 0;  // byte
};

/// As Ceilings::peak_tops(), now: in 20 ms.
std::optional<double> measure_peak_tops(ThreadPool& pool, std::string_view isa, ActFormat act);
/// Reads 1 GiB several times; about 0.5 s. kResourceExhausted without that much memory.
Result<double> measure_read_gbps(ThreadPool& pool);
/// The above and every peak; about 2 s.
Result<Ceilings> measure_ceilings(ThreadPool& pool);

}  // namespace nibble::cpu
