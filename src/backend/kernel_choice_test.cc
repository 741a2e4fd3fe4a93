#include "backend/kernel_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr WeightFormat kInt4{WeightCode::kInt4, ScalePer::kChannel, 0, DType::kF32};
constexpr WeightFormat kInt8{WeightCode::kInt8, ScalePer::kChannel, 0, DType::kF32};
const GemmProblem kSmall{kInt4, ActFormat::kInt8Token, 16, 64};
const GemmProblem kLarge{kInt4, ActFormat::kInt8Token, 4096, 64};
const GemmProblem kOther{kInt8, ActFormat::kInt8Token, 16, 64};
const GemmProblem kHead{{}, ActFormat::kBf16, 512, 64};

/// "large" takes INT4 from 64 channels on, "any" all of INT4, "int8" INT8, "head" BF16.
Result<KernelChoice> choice_of(std::span<const std::string> wanted) {
  return KernelChoice::create({.device = "cpu/test",
                               .names = {"large", "any", "int8", "head"},
                               .accepts =
                                   [](size_t entry, const GemmProblem& problem) {
                                     const WeightCode code = problem.weight.code;
                                     switch (entry) {
                                       case 0:
                                         return code == WeightCode::kInt4 && problem.n >= 64;
                                       case 1:
                                         return code == WeightCode::kInt4;
                                       case 2:
                                         return code == WeightCode::kInt8;
                                       default:
                                         return code == WeightCode::kBf16;
                                     }
                                   }},
                              wanted);
}

TEST(KernelChoice, WithoutNamesTheFirstThatAccepts) {
  const KernelChoice choice = choice_of({}).value();
  EXPECT_EQ(choice.choose(kLarge), 0U);
  EXPECT_EQ(choice.choose(kSmall), 1U);
  EXPECT_EQ(choice.choose(kHead), 3U);
  EXPECT_EQ(choice.choose({{WeightCode::kF16}, ActFormat::kBf16, 16, 16}), std::nullopt);
}

TEST(KernelChoice, SomeEntriesAreTakenOnlyWhereAskedFor) {
  const auto choose = [](std::span<const std::string> wanted) {
    return KernelChoice::create(
        {.device = "cpu/test",
         .names = {"large", "any"},
         .only_asked = 1,
         .accepts = [](size_t entry,
                       const GemmProblem& problem) { return entry == 1 || problem.n >= 64; }},
        wanted);
  };
  EXPECT_EQ(choose({})->choose(kLarge), 0U);
  EXPECT_EQ(choose({})->choose(kSmall), std::nullopt);
  const std::vector<std::string> any = {"any"};
  EXPECT_EQ(choose(any)->choose(kSmall), 1U);
}

TEST(KernelChoice, NamesComeFirstWhereTheyAccept) {
  const std::vector<std::string> any = {"any"};
  KernelChoice choice = choice_of(any).value();
  EXPECT_EQ(choice.choose(kLarge), 1U);
  EXPECT_EQ(choice.choose(kOther), 2U);
  const std::vector<std::string> both = {"any", "large"};
  EXPECT_EQ(choice_of(both)->choose(kLarge), 1U);
  const std::vector<std::string> turned = {"large", "any"};
  EXPECT_EQ(choice_of(turned)->choose(kLarge), 0U);
}

TEST(KernelChoice, RefusesAnUnknownNameWithAllNames) {
  const std::vector<std::string> wanted = {"any", "anything"};
  const Status status = choice_of(wanted).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("--kernel anything"), HasSubstr("cpu/test"),
                                      HasSubstr("large, any, int8, head")));
}

TEST(KernelChoice, RefusesANameThatTakesNoProductAndSaysWhy) {
  const std::vector<std::string> wanted = {"any", "int8"};
  KernelChoice choice = choice_of(wanted).value();
  for (const GemmProblem& problem : {kLarge, kLarge, kSmall, kHead}) {
    choice.count(*choice.choose(problem), problem);
  }
  const Status status = choice.finish();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  // The other product with INT8 activations is what it multiplies.
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("--kernel int8:"), HasSubstr("w4a8 [4096, 64], w4a8 [16, 64]"),
                    HasSubstr("bf16 [512, 64]"), HasSubstr("multiplies w8a8_int8")));
}

TEST(KernelChoice, ANameThatAnotherNameCameBeforeIsOfUse) {
  const std::vector<std::string> wanted = {"any", "large"};
  KernelChoice choice = choice_of(wanted).value();
  choice.count(*choice.choose(kLarge), kLarge);
  EXPECT_TRUE(choice.finish().ok());
  choice.count(*choice.choose(kSmall), kSmall);  // of the next model
  EXPECT_THAT(choice.finish().message(), HasSubstr("--kernel large:"));
}

}  // namespace
}  // namespace nibble
