#!/bin/sh
# The native kernels under ThreadSanitizer, valgrind and on an emulated aarch64, where the tools are installed.
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
options="-std=c++20 -pthread -g -ffp-contract=fast -fno-math-errno -fno-trapping-math"
# valgrind does not know AVX-512.
case $(uname -m) in x86_64) processor=-march=x86-64-v3 ;; *) processor= ;; esac

build() {  # compiler, output, more options
  compiler=$1 output=$2
  shift 2
  "$compiler" $options "$@" tests/native/harness.cpp tilestream/backends/cpu/native/src/attention.cpp -o "$output" -lm
}

echo "== ThreadSanitizer"
if echo 'int main() {}' | "${CXX:-c++}" -fsanitize=thread -x c++ - -o "$work/nothing" 2> "$work/why"; then
  build "${CXX:-c++}" "$work/tsan" -O1 -fsanitize=thread $processor
  TSAN_OPTIONS=die_after_fork=0 "$work/tsan" 50
else
  echo "skipped: $(head -1 "$work/why")"
fi

echo "== valgrind"
if command -v valgrind > /dev/null; then
  build "${CXX:-c++}" "$work/plain" -O1 $processor
  valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
    "$work/plain" 12 9
else
  echo "skipped: there is no valgrind"
fi

echo "== aarch64"
if command -v qemu-aarch64 > /dev/null && command -v aarch64-linux-gnu-g++ > /dev/null; then
  build aarch64-linux-gnu-g++ "$work/aarch64" -O2 -static
  qemu-aarch64 "$work/aarch64" 25 0 no-fork
else
  echo "skipped: needs qemu-aarch64 and aarch64-linux-gnu-g++"
fi
