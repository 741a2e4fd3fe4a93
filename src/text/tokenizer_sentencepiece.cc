#include <algorithm>
#include <bit>
#include <numeric>

#include "text/tokenizer_loaders.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581

// Field numbers of sentencepiece_model.proto, as far as they matter here.
enum class PieceType : uint64_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};
constexpr uint64_t kBpeModelType = 2;

struct Piece {
  std::string text;
  float score = 0;
  PieceType type = PieceType::kNormal;
};

struct SentencePieceModel {
  std::vector<Piece> pieces;
  uint64_t model_type = 1;  // unigram
  bool byte_fallback = false;
  bool whitespace_as_suffix = false;
  int32_t bos_id = 1;
  int32_t eos_id = 2;
  bool has_charsmap = false;
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
};

// One field of a protobuf message: the value of a varint or fixed field, or the bytes.
struct Field {
  uint64_t number = 0;
  uint64_t value = 0;
  std::string_view bytes;
};

// Walks over the fields of a message.
class ProtobufReader final {
 public:
  ProtobufReader(std::string_view message, std::string_view where)
      : message_(message), where_(where) {}

  [[nodiscard]] bool done() const { return at_ >= message_.size(); }

  Result<Field> next() {
    Field field;
    NIBBLE_ASSIGN_OR_RETURN(const uint64_t tag, varint());
    field.number = tag >> 3;
    switch (tag & 7) {
      case 0: {
        NIBBLE_ASSIGN_OR_RETURN(field.value, varint());
        return field;
      }
      case 1:
        return fixed(field, 8);
      case 2: {
        NIBBLE_ASSIGN_OR_RETURN(const uint64_t length, varint());
        if (length > message_.size() - at_) {
          return corrupt("a field is longer than its message");
        }
        field.bytes = message_.substr(at_, length);
        at_ += length;
        return field;
      }
      case 5:
        return fixed(field, 4);
      default:
        return corrupt("an unknown wire type");
    }
  }

 private:
  Status corrupt(std::string_view what) const {
    return make_error(StatusCode::kCorrupt,
                      "{}: not a SentencePiece model: {} near byte {} of a message of {} bytes",
                      where_, what, at_, message_.size());
  }

  Result<uint64_t> varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (done()) {
        return corrupt("the message ends inside a number");
      }
      const auto byte = static_cast<uint8_t>(message_[at_++]);
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if ((byte & 0x80) == 0) {
        return value;
      }
    }
    return corrupt("a number of more than 64 bits");
  }

  Result<Field> fixed(Field field, size_t size) {
    if (message_.size() - at_ < size) {
      return corrupt("the message ends inside a number");
    }
    for (size_t i = 0; i < size; ++i) {
      field.value |= static_cast<uint64_t>(static_cast<uint8_t>(message_[at_ + i])) << (8 * i);
    }
    at_ += size;
    return field;
  }

  std::string_view message_;
  std::string_view where_;
  size_t at_ = 0;
};

template <typename Visitor>
Status for_each_field(std::string_view message, std::string_view where, const Visitor& visit) {
  ProtobufReader reader(message, where);
  while (!reader.done()) {
    NIBBLE_ASSIGN_OR_RETURN(const Field field, reader.next());
    NIBBLE_RETURN_IF_ERROR(visit(field));
  }
  return {};
}

Result<Piece> parse_piece(std::string_view message, std::string_view where) {
  Piece piece;
  NIBBLE_RETURN_IF_ERROR(for_each_field(message, where, [&](const Field& field) {
    if (field.number == 1) piece.text = std::string(field.bytes);
    if (field.number == 2) piece.score = std::bit_cast<float>(static_cast<uint32_t>(field.value));
    if (field.number == 3) piece.type = static_cast<PieceType>(field.value);
    return Status();
  }));
  return piece;
}

Result<SentencePieceModel> parse_model(std::string_view bytes, std::string_view where) {
  SentencePieceModel model;
  const auto trainer_field = [&](const Field& field) {
    if (field.number == 3) model.model_type = field.value;
    if (field.number == 24) model.whitespace_as_suffix = field.value != 0;
    if (field.number == 35) model.byte_fallback = field.value != 0;
    if (field.number == 41) model.bos_id = static_cast<int32_t>(field.value);
    if (field.number == 42) model.eos_id = static_cast<int32_t>(field.value);
    return Status();
  };
  const auto normalizer_field = [&](const Field& field) {
    if (field.number == 2) model.has_charsmap = !field.bytes.empty();
    if (field.number == 3) model.add_dummy_prefix = field.value != 0;
    if (field.number == 4) model.remove_extra_whitespaces = field.value != 0;
    if (field.number == 5) model.escape_whitespaces = field.value != 0;
    return Status();
  };
  NIBBLE_RETURN_IF_ERROR(for_each_field(bytes, where, [&](const Field& field) -> Status {
    if (field.number == 1) {
      NIBBLE_ASSIGN_OR_RETURN(Piece piece, parse_piece(field.bytes, where));
      model.pieces.push_back(std::move(piece));
    } else if (field.number == 2) {
      return for_each_field(field.bytes, where, trainer_field);
    } else if (field.number == 3) {
      return for_each_field(field.bytes, where, normalizer_field);
    }
    return {};
  }));
  return model;
}

Status check_supported(const SentencePieceModel& model, std::string_view where) {
  if (model.pieces.empty()) {
    return make_error(StatusCode::kCorrupt, "{}: field pieces: no pieces in the model", where);
  }
  const auto unsupported = [&](std::string_view what) {
    return make_error(StatusCode::kUnsupported,
                      "{}: {} is not supported; provide the model's tokenizer.json instead", where,
                      what);
  };
  if (model.model_type != kBpeModelType) {
    return unsupported(fmt::format("field trainer_spec.model_type {} (BPE is {})", model.model_type,
                                   kBpeModelType));
  }
  if (model.whitespace_as_suffix) {
    return unsupported("field trainer_spec.treat_whitespace_as_suffix");
  }
  if (model.has_charsmap) {
    return unsupported("field normalizer_spec.precompiled_charsmap");
  }
  for (const Piece& piece : model.pieces) {
    if (piece.type == PieceType::kUnused) {
      return unsupported(fmt::format("field pieces: the unused piece '{}'", piece.text));
    }
    if (!utf8_valid(piece.text)) {
      return make_error(StatusCode::kCorrupt, "{}: field pieces: a piece is not UTF-8", where);
    }
  }
  return {};
}

// Ranks by falling score; equal scores share a rank, so that the leftmost pair wins.
std::vector<uint32_t> ranks_of(const std::vector<Piece>& pieces) {
  std::vector<size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // A score that is no number sorts last; comparing it would not be an order.
  const auto key = [&](size_t i) {
    return pieces[i].score == pieces[i].score ? pieces[i].score
                                              : -std::numeric_limits<float>::infinity();
  };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) > key(b); });
  std::vector<uint32_t> ranks(pieces.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const bool same_as_previous = i > 0 && key(order[i]) == key(order[i - 1]);
    ranks[order[i]] = same_as_previous ? ranks[order[i - 1]] : static_cast<uint32_t>(i);
  }
  return ranks;
}

std::vector<std::string> names_of(const std::vector<Piece>& pieces) {
  std::vector<std::string> names;
  names.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    names.push_back(piece.text);
  }
  return names;
}

Status add_normalizer(const SentencePieceModel& model,
                      PrependScheme scheme,
                      std::string_view where,
                      TokenizerParts& parts) {
  if (model.remove_extra_whitespaces) {
    NIBBLE_ASSIGN_OR_RETURN(Regex ends, Regex::compile(R"(\A +| +\z)", where));
    NIBBLE_ASSIGN_OR_RETURN(Regex runs, Regex::compile(" {2,}", where));
    parts.normalizer.add(ReplacePatternStep{std::move(ends), ""});
    parts.normalizer.add(ReplacePatternStep{std::move(runs), " "});
  }
  if (model.add_dummy_prefix) {
    parts.normalizer.add(PrependStep{" ", scheme});
    parts.strip_leading_space = true;
  }
  if (model.escape_whitespaces) {
    parts.normalizer.add(ReplaceTextStep{" ", std::string(kSpaceMark)});
  }
  return {};
}

Status add_pieces(const SentencePieceModel& model,
                  BpeVocabulary& vocabulary,
                  BpeOptions& options,
                  TokenizerParts& parts) {
  for (size_t i = 0; i < model.pieces.size(); ++i) {
    const Piece& piece = model.pieces[i];
    const auto id = static_cast<int32_t>(i);
    const std::string shown = replace_all(piece.text, kSpaceMark, " ");
    vocabulary.pieces.emplace_back();
    parts.token_bytes.push_back(shown);
    if (piece.type == PieceType::kNormal) {
      vocabulary.pieces.back() = piece.text;
    } else if (piece.type == PieceType::kByte) {
      const auto value = byte_piece_value(piece.text);
      if (!value) {
        return make_error(StatusCode::kCorrupt, "field pieces: '{}' is no byte piece", piece.text);
      }
      vocabulary.byte_id[*value] = id;
      parts.token_bytes.back() = std::string(1, static_cast<char>(*value));
    } else if (piece.type == PieceType::kUserDefined) {
      vocabulary.pieces.back() = piece.text;
      NIBBLE_RETURN_IF_ERROR(put_added_token(
          {.id = id, .content = shown, .pattern = piece.text, .normalized = true}, parts));
    } else {
      if (piece.type == PieceType::kUnknown) options.unknown_id = id;
      NIBBLE_RETURN_IF_ERROR(
          put_added_token({.id = id, .content = piece.text, .special = true}, parts));
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> tokenizer_from_sentencepiece(std::string_view model_bytes,
                                                                const TokenizerConfig& config,
                                                                std::string_view where) {
  NIBBLE_ASSIGN_OR_RETURN(const SentencePieceModel model, parse_model(model_bytes, where));
  NIBBLE_RETURN_IF_ERROR(check_supported(model, where));

  TokenizerParts parts;
  BpeVocabulary vocabulary;
  BpeOptions options{
      .unit = SymbolUnit::kCodePoint, .byte_fallback = model.byte_fallback, .fuse_unknown = true};
  NIBBLE_RETURN_IF_ERROR(add_pieces(model, vocabulary, options, parts).with_context(where));
  const PrependScheme scheme = config.legacy ? PrependScheme::kAlways : PrependScheme::kFirst;
  NIBBLE_RETURN_IF_ERROR(add_normalizer(model, scheme, where, parts));
  parts.model = BpeModel::from_ranks(std::move(vocabulary), ranks_of(model.pieces), options);

  const auto known = [&](int32_t id) {
    return id >= 0 && static_cast<size_t>(id) < model.pieces.size();
  };
  if (known(model.bos_id)) {
    parts.bos_id = model.bos_id;
    parts.bos_token = model.pieces[static_cast<size_t>(model.bos_id)].text;
    parts.prompt_prefix = {model.bos_id};
  }
  if (known(model.eos_id)) {
    parts.eos_id = model.eos_id;
    parts.eos_token = model.pieces[static_cast<size_t>(model.eos_id)].text;
  }
  VocabularyNames names(names_of(model.pieces));
  NIBBLE_RETURN_IF_ERROR(apply_tokenizer_config(config, names, parts));
  return Tokenizer::create(std::move(parts));
}

}  // namespace nibble
