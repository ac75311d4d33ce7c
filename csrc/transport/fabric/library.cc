#include "transport/fabric/library.h"

#include <dlfcn.h>

#include "common/error.h"

namespace smddp::transport::fabric {
namespace {

// The ABI that our headers describe; later releases keep it. Where it lies is the loader's to know: LD_LIBRARY_PATH,
// then the run path that the build gave us, then the system's folders.
constexpr const char* kName = "libfabric.so.1";

// dlsym() takes the newest version of a symbol, a linker the newest at build time. For us they are the same: structs
// of later versions have more fields at their end, and it is the library that allocates them.
template <typename Function>
void find(void* handle, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, symbol));
  if (function == nullptr) raise(ErrorKind::Usage, "{} has no function {}", kName, symbol);
}

Library load() {
  void* const handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();
    raise(
        ErrorKind::Usage,
        "libfabric cannot be loaded, and ranks on several nodes need it: {}. Install libfabric >= "
        "1.17, or name the folder of {} in LD_LIBRARY_PATH",
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
