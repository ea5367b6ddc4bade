// Functions of libcuda.so.1 that nobody calls here, but without which libraries do not load.
#define DOES_NOTHING(name) \
  int name(void) { return 0; }

DOES_NOTHING(cuLaunchCooperativeKernel)
DOES_NOTHING(cuLinkAddData_v2)
DOES_NOTHING(cuLinkComplete)
DOES_NOTHING(cuLinkCreate_v2)
DOES_NOTHING(cuModuleLoad)
DOES_NOTHING(cuModuleLoadDataEx)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuTensorMapEncodeIm2col)
DOES_NOTHING(cuTensorMapEncodeTiled)
