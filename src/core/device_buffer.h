#pragma once

#include <cstddef>
#include <functional>
#include <utility>

namespace nibble {

/// Owned memory of a backend's device (host memory on CPUs). Move-only.
class DeviceBuffer final {
 public:
  using Free = std::function<void(void*)>;

  DeviceBuffer() = default;
  /// Takes `data`, which `free` gives back.
  DeviceBuffer(void* data, size_t size, Free free)
      : data_(data), size_(size), free_(std::move(free)) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(free_, other.free_);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
    if (data_ != nullptr) {
      free_(data_);
    }
  }

  [[nodiscard]] size_t size() const { return size_; }  // bytes
  /// The memory as elements of T, which only the device may read.
  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
  Free free_;
};

}  // namespace nibble
