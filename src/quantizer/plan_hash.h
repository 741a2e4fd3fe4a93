#pragma once

#include <string>

#include "base/status.h"
#include "quantizer/plan.h"

namespace nibble {

/// A hash, in hexadecimal, of everything that decides the bytes of the output: the jobs and their
/// places, the scale rule, and name, size and time of change of every source file. Equal hashes
/// mean that work of an earlier run can be continued.
Result<std::string> plan_hash(const QuantizePlan& plan,
                              const CheckpointReader& reader,
                              ScaleRule rule);

/// A hash, in hexadecimal, of name, size and time of change of every source file.
Result<std::string> source_hash(const CheckpointReader& reader);

}  // namespace nibble
