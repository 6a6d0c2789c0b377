// A device of Paddle's: its memory is the host's, beyond the reach of CPU kernels' dispatch; it has no kernels of its own, so Paddle
// runs those of the CPU on copies (FLAGS_enable_api_kernel_fallback). TYPE is its name, DEVICES how many there are.
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "paddle/phi/backends/device_ext.h"

namespace {

constexpr size_t kDevices = DEVICES;

C_Status Done() { return C_SUCCESS; }
C_Status OnDevice(const C_Device) { return C_SUCCESS; }
thread_local int current = 0;
C_Status SetDevice(const C_Device device) {
  current = static_cast<int>(device->id);
  return C_SUCCESS;
}
C_Status GetDevice(const C_Device device) {
  device->id = current;
  return C_SUCCESS;
}
C_Status Count(size_t* count) {
  *count = kDevices;
  return C_SUCCESS;
}
C_Status List(size_t* devices) {
  for (size_t k = 0; k < kDevices; ++k) devices[k] = k;
  return C_SUCCESS;
}
C_Status NewStream(const C_Device, C_Stream* stream) {
  *stream = nullptr;
  return C_SUCCESS;
}
C_Status OnStream(const C_Device, C_Stream) { return C_SUCCESS; }
C_Status NewEvent(const C_Device, C_Event* event) {
  *event = nullptr;
  return C_SUCCESS;
}
C_Status Record(const C_Device, C_Stream, C_Event) { return C_SUCCESS; }
C_Status OnEvent(const C_Device, C_Event) { return C_SUCCESS; }
C_Status Allocate(const C_Device, void** pointer, size_t size) {
  *pointer = std::malloc(size);
  return *pointer != nullptr ? C_SUCCESS : C_FAILED;
}
C_Status Free(const C_Device, void* pointer, size_t) {
  std::free(pointer);
  return C_SUCCESS;
}
C_Status Copy(const C_Device, void* to, const void* from, size_t size) {
  std::memcpy(to, from, size);
  return C_SUCCESS;
}
C_Status CopyOnStream(const C_Device, C_Stream, void* to, const void* from, size_t size) {
  std::memcpy(to, from, size);
  return C_SUCCESS;
}
C_Status Memory(const C_Device, size_t* total, size_t* free) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
  *total = page * static_cast<size_t>(sysconf(_SC_PHYS_PAGES));
  *free = page * static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES));
  return C_SUCCESS;
}
C_Status Chunk(const C_Device, size_t* size) {
  *size = 64;
  return C_SUCCESS;
}

}  // namespace

extern "C" void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>(TYPE);
  params->sub_device_type = const_cast<char*>("v1");
  C_DeviceInterface* device = params->interface;
  std::memset(static_cast<void*>(device), 0, sizeof(C_DeviceInterface));
  device->size = sizeof(C_DeviceInterface);
  device->initialize = device->finalize = Done;
  device->set_device = SetDevice;
  device->init_device = device->deinit_device = device->synchronize_device = OnDevice;
  device->get_device = GetDevice;
  device->get_device_count = Count;
  device->get_device_list = List;
  device->create_stream = NewStream;
  device->destroy_stream = device->synchronize_stream = device->query_stream = OnStream;
  device->create_event = NewEvent;
  device->record_event = Record;
  device->stream_wait_event = Record;
  device->destroy_event = device->synchronize_event = device->query_event = OnEvent;
  device->device_memory_allocate = device->host_memory_allocate = device->unified_memory_allocate = Allocate;
  device->device_memory_deallocate = device->host_memory_deallocate = device->unified_memory_deallocate = Free;
  device->memory_copy_h2d = device->memory_copy_d2h = device->memory_copy_d2d = Copy;
  device->async_memory_copy_h2d = device->async_memory_copy_d2h = device->async_memory_copy_d2d = CopyOnStream;
  device->device_memory_stats = Memory;
  device->device_min_chunk_size = Chunk;
}
