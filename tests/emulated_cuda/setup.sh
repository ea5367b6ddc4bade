#!/usr/bin/env bash
# setup.sh FOLDER [PYTHON] [STACK]: makes FOLDER, a virtual environment with the CUDA builds of torch
# and FBGEMM for TorchRec STACK, 1.8 or 1.9, and the emulated GPU (8 GB, some minutes), and
# FOLDER/bin/emulated, which runs a command in it.  Run from the project's root.
set -euo pipefail
sources=$(cd "$(dirname "$0")/runtime" && pwd)
case ${3:-1.8} in
  1.8) torch=2.13.0 fbgemm=1.8.0 torchrec=1.8.0 ;;
  1.9) torch=2.14.1 fbgemm=1.9.0 torchrec=1.9.2 ;;
  *) echo "setup.sh: STACK is \"$3\", must be 1.8 or 1.9" >&2 && exit 2 ;;
esac
folder=$(mkdir -p "$1" && cd "$1" && pwd)
"${2:-python3.11}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet)
"${pip[@]}" --upgrade pip
"${pip[@]}" -r requirements-common.txt
# Three equals signs: the CUDA build, where pip also sees one for CPU (2.13.0+cpu).
"${pip[@]}" "torch===$torch"
# Without what they require: torch is there, and so is the rest, by requirements-common.txt.
"${pip[@]}" --no-deps "fbgemm-gpu==$fbgemm" "torchrec==$torchrec" tensordict==0.15.3 \
  torchmetrics==1.0.3
"${pip[@]}" --no-deps --no-build-isolation --editable .

packages=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
headers=(-I"$packages/nvidia/cu13/include" -I"$packages/triton/backends/nvidia/include")
libraries="$folder/emulator"
mkdir -p "$libraries/driver"
compile=(g++ -O1 -std=c++17 -shared -fPIC "${headers[@]}")
"${compile[@]}" "$sources/runtime.cpp" -o "$libraries/libcuda_emulator.so"
gcc -c -fPIC "$sources/driver_unused.c" -o "$libraries/driver_unused.o"
"${compile[@]}" "$sources/driver.cpp" "$libraries/driver_unused.o" -o "$libraries/driver/libcuda.so.1"
gcc -shared -fPIC "$sources/nvml.c" -o "$libraries/driver/libnvidia-ml.so.1"

cat > "$folder/bin/emulated" <<END
#!/usr/bin/env bash
# Runs a command of this environment with emulated GPUs, two unless EMULATED_GPUS says otherwise.
export CUDA_EMULATOR=$libraries LD_PRELOAD=$libraries/libcuda_emulator.so
export LD_LIBRARY_PATH=$libraries/driver TRITON_LIBCUDA_PATH=$libraries/driver
export EMULATED_GPUS=\${EMULATED_GPUS:-2} OMP_NUM_THREADS=1 PATH=$folder/bin:\$PATH
exec "\$@"
END
chmod +x "$folder/bin/emulated"
"$folder/bin/emulated" python -c "
import fbgemm_gpu, torch
print(torch.__version__, torch.cuda.device_count(), torch.cuda.get_device_name(0))"
