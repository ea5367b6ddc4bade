// Lets torch without CUDA index tensors that only claim to be on a GPU: choosing a device does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using Nothing = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Nothing());
} // namespace
