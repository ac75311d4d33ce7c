#include "transport/fabric/library.h"

#include <dlfcn.h>

#include "common/error.h"

namespace smddp::transport::fabric {
namespace {

// The ABI of our headers; later releases keep it. The loader searches LD_LIBRARY_PATH, then the run path of the build,
// then the system's folders.
constexpr const char* kName = "libfabric.so.1";

// dlsym() takes the newest version of a symbol; a linker takes the newest one at build time. Both work here: in later
// versions structs have more fields at their end, and the library itself allocates them.
template <typename Function>
void find(void* handle, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, symbol));
  if (function == nullptr) raise(ErrorKind::Usage, "{} has no function {}", kName, symbol);
}

Library load() {
  void* const handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();
    raise(ErrorKind::Usage,
          "libfabric cannot be loaded: {}. Install libfabric >= 1.17, or name the folder of {} in "
          "LD_LIBRARY_PATH, or set SMDDP_PROVIDER=sockets",
          why != nullptr ? why : "no reason given", kName);
  }
  Library found{};
  find(handle, "fi_getinfo", found.getInfo);
  find(handle, "fi_dupinfo", found.dupInfo);
  find(handle, "fi_freeinfo", found.freeInfo);
  find(handle, "fi_fabric", found.openFabric);
  find(handle, "fi_version", found.version);
  find(handle, "fi_strerror", found.describeError);
  return found;
}

}  // namespace

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

}  // namespace smddp::transport::fabric
