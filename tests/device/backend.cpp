// SPDX-License-Identifier: Apache-2.0
//
// backend.cpp: what torch asks a device for: the guard (streams and events), and the hooks.

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "generator.h"
#include "memory.h"
#include "stream.h"

namespace fake {
namespace {

const c10::Device kOnly(kFake, 0);  // there is one device

c10::Stream as_torch(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, kOnly, stream.id);
}
Event& event_of(void* opaque) { return *static_cast<Event*>(opaque); }

std::atomic<bool> has_failed{false};  // as after an assert in a kernel: every call throws from then on

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device) const override { return kOnly; }
  c10::Device getDevice() const override { return kOnly; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one fake device, not ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device) const override { return as_torch(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_torch(stream(0)); }
  c10::Stream getNewStream(c10::Device, int) const override { return as_torch(new_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_torch(stream_from_pool());
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = getStream(kOnly);
    set_current_stream(next.id());
    return before;
  }
  bool queryStream(const c10::Stream& s) const override { return stream(s.id()).is_idle(); }
  void synchronizeStream(const c10::Stream& s) const override { stream(s.id()).wait(); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    TORCH_CHECK(!is_any_captured(), "not permitted while a stream is captured");
    wait_for_all_streams();
  }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    event_of(*event).record(stream(s.id()));
  }
  void block(void* event, const c10::Stream& s) const override {
    TORCH_CHECK(!has_failed, "the fake device has failed");
    if (event != nullptr) event_of(event).block(stream(s.id()));
  }
  bool queryEvent(void* event) const override {
    TORCH_CHECK(!has_failed, "the fake device has failed");
    return event == nullptr || event_of(event).is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) event_of(event).wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "both events must be over");
    const std::chrono::duration<double, std::milli> between =
        event_of(second).time() - event_of(first).time();
    return between.count();
  }
  bool isStreamCapturing(const c10::Stream& s) const { return captured_on(s.id()) != nullptr; }  // torch 2.13 asks
  void recordDataPtrOnStream(const c10::DataPtr& bytes, const c10::Stream& s) const override {
    TORCH_CHECK(!has_failed, "the fake device has failed");
    record_use(bytes, s);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }

  bool isPinnedPtr(const void* data) const override { return pinned_memory().owns(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kFake); }
  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(device_memory().owns(data), "not an address on the fake device");
    return kOnly;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl.resizable(), "the storage is not resizable");
    c10::DataPtr bytes = c10::GetAllocator(kFake)->allocate(nbytes);
    if (const std::size_t kept = std::min(nbytes, impl.nbytes()); kept > 0) {
      Stream& s = current_stream();
      device_memory().note_use(impl.data(), s.id);
      s.enqueue("resize_", [to = bytes.get(), from = impl.data(), kept] {
        std::memcpy(to, from, kept);
      });
    }
    impl.set_data_ptr_noswap(std::move(bytes));
    impl.set_nbytes(nbytes);
  }
};

const c10::impl::DeviceGuardImplRegistrar guard(kFake, new Guard);
const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace fake

extern "C" {

void fake_fail(int fails) { fake::has_failed = fails != 0; }

}  // extern "C"
