#include "text/grammar/schema_budget.h"

#include "text/grammar/grammar_cost.h"
#include "text/grammar/schema_writer.h"

namespace nibble {
namespace {

// Far above what tools of agents send together: some 100 KiB.
constexpr size_t kMostBytes = size_t{512} << 10;
constexpr int64_t kMostSteps = int64_t{1} << 20;  // measured: 0.2 s

}  // namespace

Status SchemaBudget::take_bytes(size_t bytes) {
  bytes_ += bytes;
  return bytes_ <= kMostBytes
             ? Status()
             : make_error(StatusCode::kInvalidArgument,
                          "the schemas of this request have more than {} KiB; send smaller ones",
                          kMostBytes >> 10);
}

Status SchemaBudget::take_steps(std::string_view pointer, int64_t steps) {
  steps_ += steps;
  return steps_ <= kMostSteps
             ? Status()
             : schema_error(pointer,
                            "it takes too long to follow the references and to compare the values "
                            "of this request's schemas; make them shorter");
}

Status SchemaBudget::take_cost(std::string_view pointer, int64_t cost) {
  cost_ += cost;
  return cost_ <= kMostGrammarCost
             ? Status()
             : schema_error(pointer,
                            "the patterns, formats, lengths, values and free members of this "
                            "request's schemas take too long to prepare together; leave some out, "
                            "or make them shorter");
}

}  // namespace nibble
