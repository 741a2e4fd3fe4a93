#pragma once

#include <cstddef>
#include <vector>

namespace nibble {

/// reserve(), and asks for huge pages where the numbers take some: products of large matrices read
/// columns and rows that are pages apart, and run a quarter faster so. What is there already keeps
/// its pages; call it before the numbers are touched.
void reserve_in_huge_pages(std::vector<float>& numbers, size_t count);

}  // namespace nibble
