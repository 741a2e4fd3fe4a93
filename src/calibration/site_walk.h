#pragma once

#include <functional>

#include "calibration/layer_jobs.h"
#include "calibration/layer_runner.h"

namespace nibble {

/// Who sees the rows of a site; null: nobody.
using SiteWatch = std::function<RowObserver*(Site site)>;

/// Runs the layer that the runner has loaded on its hidden states, site by site. Who watches
/// kExpertUp sees all rows of the layer once; `experts`, if there is one, is shown what down of the
/// routed ones multiplies. Nobody sees the rows of latent attention.
void walk_sites(LayerRunner& runner,
                ForwardContext& context,
                const SiteWatch& watch,
                ExpertObserver* experts);

}  // namespace nibble
