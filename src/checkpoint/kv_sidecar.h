#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "arch/config.h"
#include "base/json.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "quant/kv_formats.h"

namespace nibble {

inline constexpr std::string_view kKvSidecarName = "nibble_kv.json";
inline constexpr int64_t kKvSidecarVersion = 1;

/// What a model must have for a sidecar to be its own, whatever its weights.
struct KvSidecarShape {
  int64_t layers = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  bool sinks = false;  // attention has sinks: nothing is centred
};

[[nodiscard]] KvSidecarShape kv_sidecar_shape(const ModelConfig& config);

/// How the keys and values of each layer enter a cache whose format has HeadForm, beside a model:
///   {"nibble_kv": 1, "kv_heads", "head_dim", "weights_xxh64", "calibration": {...},
///    "layers": [{"keys": HALF, "values": HALF}, ...]}
///   HALF: {"form": "plain" | "centred" | "turned" | "centred+turned", "mean": [numbers] or null,
///          "page_form": form, "ranges": {"form": "plain" | "turned", "mean": [numbers] or null,
///          "step": [numbers]}, "errors": {form: number, ...}}
/// Forms may be edited by hand: no mean changes what attention computes, only what codes lose. The
/// page_form, of keys in int4_page, the ranges, which int4_static needs, and the hash of the
/// weights may be absent or null.
struct KvSidecar {
  /// Of int4_static: code c of a channel stands for (c - 8) * step + mean.
  struct Ranges {
    bool turned = false;
    std::vector<float> mean;  // [kv_heads, head_dim] as that of a half; empty beside sinks
    std::vector<float> step;  // [kv_heads, head_dim] of what the turn makes
  };
  struct Half {
    HeadForm form;                      // of int4, and of values in int4_page
    std::optional<HeadForm> page_form;  // of keys in int4_page; none: turned
    std::optional<Ranges> ranges;
    std::vector<float> mean;  // [kv_heads, head_dim], of keys after their rotation; or empty
    // Squared error of attention's results with codes of each form, the other half fixed, over the
    // square of the results; by head_form_index(), negative where it was not measured. Not read.
    std::array<double, kHeadForms.size()> errors = {-1, -1, -1, -1};
  };
  struct Layer {
    Half keys;
    Half values;
  };

  std::vector<Layer> layers;
  Json calibration;     // which text it is of; null: not known
  std::string weights;  // kv_weights_digest() of those it is of; empty: not known
};

/// Tells the weights that make keys and values from others: modules_digest() of all layers'. Empty
/// where none is stored.
[[nodiscard]] std::string kv_weights_digest(const CheckpointReader& weights,
                                            const ModelConfig& config);

/// "FOLDER/nibble_kv.json"; of a GGUF file "FILE.nibble_kv.json", beside it.
[[nodiscard]] std::string kv_sidecar_path(const std::string& model);

/// kCorrupt naming file and field, and saying what to do, for what is missing, of a wrong type or
/// size, unknown, or far above any key or value; kUnsupported for another version, and for centred
/// forms or means of ranges beside sinks; kIo.
Result<KvSidecar> read_kv_sidecar(const std::string& path, const KvSidecarShape& shape);

/// Replaces the file in one step, durably.
Status write_kv_sidecar(const KvSidecar& sidecar,
                        const KvSidecarShape& shape,
                        const std::string& path);

/// Whether all layers have ranges for keys and values.
[[nodiscard]] bool has_ranges(const KvSidecar& sidecar);

/// "keys centred+turned in 28 layers, turned in 2; values turned in 30".
[[nodiscard]] std::string describe(const KvSidecar& sidecar);

}  // namespace nibble
