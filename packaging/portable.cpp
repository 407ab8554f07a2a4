// This file is linked into each library that is compiled for a wheel. `TERAIO_BUILT_FOR` is the text by which
// teraio recognizes the library.
extern "C" {
// glibc 2.32 added this variable. The value 0 makes shared pointers use atomic operations at all times.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

const char* teraio_built_for() {
  return TERAIO_BUILT_FOR;
}
}
