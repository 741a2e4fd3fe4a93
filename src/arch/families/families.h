#pragma once

#include <array>

#include "arch/family.h"

namespace nibble {

extern const Family kLlama;
extern const Family kMistral;
extern const Family kQwen2;
extern const Family kQwen3;
extern const Family kMixtral;
extern const Family kQwen2Moe;
extern const Family kQwen3Moe;
extern const Family kGptOss;
extern const Family kDeepseekV3;
extern const Family kKimiK2;
extern const Family kKimiK25;
extern const Family kOpt;
extern const Family kStarcoder2;

/// All families. The first of several of one architecture is meant where model_type names none of
/// them.
inline constexpr std::array kFamilies = {
    &kLlama,  &kMistral,    &kQwen2,  &kQwen3,   &kMixtral, &kQwen2Moe,  &kQwen3Moe,
    &kGptOss, &kDeepseekV3, &kKimiK2, &kKimiK25, &kOpt,     &kStarcoder2};

}  // namespace nibble
