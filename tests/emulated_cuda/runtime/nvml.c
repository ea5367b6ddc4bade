// Stands in for NVIDIA's management library, libnvidia-ml.so.1, which FBGEMM does not load without.
// There is nothing to manage: every call is an error (NVML_ERROR_UNKNOWN).
#define FAILS(name) \
  int name(void) { return 999; }

FAILS(nvmlInit_v2)
FAILS(nvmlDeviceGetCount_v2)
FAILS(nvmlDeviceGetHandleByIndex_v2)
FAILS(nvmlDeviceGetNvLinkRemotePciInfo_v2)
FAILS(nvmlDeviceGetNvLinkState)
FAILS(nvmlDeviceGetPciInfo_v3)
