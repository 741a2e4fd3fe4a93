#pragma once

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/source_matrix.h"

namespace nibble {

/// The output head that a checkpoint stores; nullptr when there is none. Of a family that is not
/// known it is found by its name.
///   config  parsed config.json of the checkpoint
[[nodiscard]] const SourceMatrix* find_head(const Json& config, const SourceModel& model);

/// Makes sure that `model` has an output head: where the checkpoint stores none, because the head
/// is the table of the embeddings once more, a matrix of the head's name that reads that table is
/// added at the end. Returns it; nullptr when a head is stored.
///   config  parsed config.json of the checkpoint
/// kInvalidArgument when the family is not known, so that nothing says what its head is called;
/// kUnsupported when the table is missing or quantized.
Result<const SourceMatrix*> add_tied_head(const CheckpointReader& reader,
                                          const Json& config,
                                          SourceModel& model);

/// config.json of a model whose head has weights of its own: tie_word_embeddings is false, at the
/// top or where the fields of the text model are. Programs that find it true read the table.
[[nodiscard]] Json with_own_head(Json config);

}  // namespace nibble
