#pragma once

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

}  // namespace nibble
