// The Python module smddp.torch._C. It has bindings only, no logic.
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/error_types.h"
#include "bindings/interrupt.h"
#include "bindings/plan_tool.h"
#include "bindings/random_number.h"
#include "common/config.h"
#include "common/control_groups.h"
#include "engine/process/capabilities.h"
#include "engine/shared_engine.h"
#include "process_group/call_order.h"
#include "process_group/comm_tensors.h"
#include "process_group/device/calls.h"
#include "process_group/device/gpu_process_group.h"
#include "process_group/elastic_members.h"
#include "process_group/errors.h"
#include "process_group/mailbox.h"
#include "process_group/message_codec.h"
#include "process_group/process_group.h"

namespace py = pybind11;
using smddp::process_group::ProcessGroup;

namespace {

// The include path may have another torch in front.
static_assert(TORCH_VERSION_MAJOR == SMDDP_TORCH_VERSION_MAJOR &&
              TORCH_VERSION_MINOR == SMDDP_TORCH_VERSION_MINOR);

using GroupClass = py::class_<ProcessGroup, c10d::Backend, c10::intrusive_ptr<ProcessGroup>>;

py::dict describeUse(const smddp::engine::plans::AlgorithmUse& use) {
  return py::dict(py::arg("calls") = use.calls, py::arg("bytes") = use.bytes,
                  py::arg("memory_bytes") = use.memoryBytes,
                  py::arg("fabric_bytes") = use.fabricBytes, py::arg("zero_copy") = use.zeroCopy);
}

#if SMDDP_TORCH_VERSION_MINOR < 14
// split_group() of these releases hands a copy of the parent's attribute `options` to the new group. torch's own class
// cannot be copied in Python.
struct CopyableOptions : c10d::Backend::Options {
  explicit CopyableOptions(const c10d::Backend::Options& options)
      : c10d::Backend::Options(options) {}
};

void bindOptions(py::module& m, GroupClass& group) {
  using Options = c10::intrusive_ptr<CopyableOptions>;
  const auto copy = [](const c10d::Backend::Options& options) {
    return c10::make_intrusive<CopyableOptions>(options);
  };
  py::class_<CopyableOptions, c10d::Backend::Options, Options>(m, "CopyableOptions")
      .def("__deepcopy__",
           [copy](const CopyableOptions& self, const py::dict&) { return copy(self); });
  group.def_property_readonly(
      "options", [copy](ProcessGroup& self) { return copy(*self.getBackendOptions()); });
}
#endif

// A factory must not have the guard Release: pybind11 would enter the new object into its table of all objects without
// the interpreter lock, while other threads use the table. The factory releases the lock itself.
void bindProcessGroup(py::module& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  GroupClass group(m, "ProcessGroup");
  group
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, const std::string& name,
                       const std::string& algorithm, const std::string& wire,
                       const std::vector<int>& ranksOfWorld, bool waitsForMembers) {
             const py::gil_scoped_release release;
             return c10::make_intrusive<ProcessGroup>(
                 ProcessGroup::Creation{store,
                                        rank,
                                        size,
                                        timeout,
                                        name,
                                        {algorithm, wire},
                                        ranksOfWorld,
                                        waitsForMembers},
                 std::make_unique<smddp::process_group::device::Calls>());
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("name"),
           py::arg("algorithm") = "", py::arg("wire") = "",
           py::arg("ranks_of_world") = std::vector<int>{}, py::arg("waits_for_members") = false)
      .def("describe", &ProcessGroup::describe, Release())
      .def("abort_because", &ProcessGroup::abortBecause, py::arg("reason"), Release())
      // If a device is bound, new_group() calls this on ranks that are not in the new group.
      .def("perform_nocolor_split", [](ProcessGroup&, const c10::Device&) {})
      .def("statistics", [](ProcessGroup& group) {
        std::map<std::string, smddp::engine::plans::AlgorithmUse> uses;
        {
          const py::gil_scoped_release release;
          uses = group.statistics();
        }
        py::dict result;
        for (const auto& [name, use] : uses) result[py::str(name)] = describeUse(use);
        return result;
      });
#if SMDDP_TORCH_VERSION_MINOR < 14
  bindOptions(m, group);
#endif
  using smddp::process_group::device::GpuProcessGroup;
  using smddp::process_group::device::GpuSupport;
  py::class_<GpuProcessGroup, ProcessGroup, c10::intrusive_ptr<GpuProcessGroup>>(m,
                                                                                 "GpuProcessGroup")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, const std::string& name,
                       const std::string& algorithm, const std::string& wire,
                       const std::vector<int>& ranksOfWorld, const std::string& type,
                       decltype(GpuSupport::nameOf) nameOf, decltype(GpuSupport::makeNccl) makeNccl,
                       const std::string& library) {
             const py::gil_scoped_release release;
             return c10::make_intrusive<GpuProcessGroup>(
                 ProcessGroup::Creation{
                     store, rank, size, timeout, name, {algorithm, wire}, ranksOfWorld},
                 GpuSupport{c10::Device(type).type(), std::move(nameOf), std::move(makeNccl),
                            library});
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("name"),
           py::arg("algorithm"), py::arg("wire"), py::arg("ranks_of_world"), py::arg("device_type"),
           py::arg("name_of"), py::arg("make_nccl"), py::arg("cuda_part") = "")
      .def("gpu_path", &GpuProcessGroup::path);
  m.def(
      "empty",
      [](const std::vector<int64_t>& sizes, at::ScalarType type) {
        return smddp::process_group::emptyTensor(sizes, at::TensorOptions().dtype(type));
      },
      py::arg("sizes"), py::arg("dtype"), Release());
  m.def("shutdown", &smddp::engine::shutdownSharedEngine, Release());
  using smddp::process_group::HookThread;
  m.def(
      "finish_hooks", [] { return HookThread::ofThisProcess().waitForAll(); }, Release());
  m.def("end_hooks", [] { smddp::bindings::endPythonOf(HookThread::kName); });
  m.def(
      "report_trouble",
      [](const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank,
         int jobRank, bool isUsage, bool isSignal, const std::string& text) {
        const auto kind = isUsage    ? smddp::ErrorKind::Usage
                          : isSignal ? smddp::ErrorKind::Aborted
                                     : smddp::ErrorKind::Resource;
        smddp::process_group::reportTrouble(store, name, rank, jobRank, smddp::Error(kind, text));
      },
      py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("job_rank"), py::arg("is_usage"),
      py::arg("is_signal"), py::arg("text"), Release());
}

void bindCallOrder(py::module& m) {
  using smddp::process_group::CallOrder;
  using smddp::process_group::Work;
  py::class_<CallOrder, std::shared_ptr<CallOrder>>(m, "CallOrder")
      .def(
          "run",
          [](const std::shared_ptr<CallOrder>& order, const py::function& callback,
             const py::args& arguments) {
            const CallOrder::Callback scope(order);
            return callback(*arguments);
          },
          py::arg("callback"));
  // Null for messages, and for calls of other backends.
  m.def(
      "order_of",
      [](const c10::intrusive_ptr<c10d::Work>& work) -> std::shared_ptr<CallOrder> {
        const auto* ours = dynamic_cast<const Work*>(work.get());
        return ours == nullptr ? nullptr : ours->order();
      },
      py::arg("work"));
}

void bindMailbox(py::module& m) {
  using smddp::process_group::Mailbox;
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Mailbox>(m, "Mailbox")
      .def(py::init([](const c10::intrusive_ptr<ProcessGroup>& group) {
             return std::make_unique<Mailbox>(group);
           }),
           py::arg("group"))
      .def("open", &Mailbox::open, Release())
      .def(
          "take",
          [](Mailbox& mailbox, bool block) {
            std::vector<Mailbox::Arrival> arrived;
            {
              const py::gil_scoped_release release;
              arrived = mailbox.take(block);
            }
            py::list result;
            for (auto& arrival : arrived) {
              result.append(py::make_tuple(arrival.peer, py::bytes(arrival.header),
                                           std::move(arrival.tensors), arrival.last,
                                           smddp::bindings::asPythonError(arrival.error)));
            }
            return result;
          },
          py::arg("block"))
      .def("interrupt", &Mailbox::interrupt, Release())
      .def("send", &Mailbox::send, py::arg("peer"), py::arg("header"), py::arg("tensors"),
           py::arg("last"), Release())
      .def("flush", &Mailbox::flush, Release());
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
void bindElasticMembers(py::module& m) {
  using smddp::process_group::ElasticMembers;
  using Members = ElasticMembers::Members;
  using Release = py::call_guard<py::gil_scoped_release>;
  const auto nanoseconds = [](double seconds) {
    return static_cast<smddp::Nanoseconds>(seconds * 1e9);
  };
  py::class_<Members>(m, "Members")
      .def_readonly("generation", &Members::number)
      .def_readonly("rank", &Members::rank)
      .def_readonly("cards", &Members::cards)
      .def_readonly("step", &Members::step)
      .def_readonly("left", &Members::left)
      .def_readonly("came", &Members::came)
      .def_readonly("out", &Members::out);
  py::class_<ElasticMembers>(m, "ElasticMembers")
      .def(py::init([nanoseconds](const c10::intrusive_ptr<ProcessGroup>& group, double grace) {
             const py::gil_scoped_release release;
             return std::make_unique<ElasticMembers>(group, nanoseconds(grace));
           }),
           py::arg("group"), py::arg("grace") = 9.0)
      .def("card", &ElasticMembers::card)
      .def(
          "begin",
          [nanoseconds](ElasticMembers& self, const std::vector<std::string>& cards, int64_t step,
                        double timeout) { return self.begin(cards, step, nanoseconds(timeout)); },
          py::arg("cards"), py::arg("step") = 0, py::arg("timeout") = 60.0, Release())
      .def(
          "join",
          [nanoseconds](ElasticMembers& self, const std::vector<std::string>& cards,
                        double timeout) { return self.join(cards, nanoseconds(timeout)); },
          py::arg("cards"), py::arg("timeout"), Release())
      .def("hear", &ElasticMembers::hear, py::arg("card"), Release())
      .def("newcomers", &ElasticMembers::numNewcomers, Release())
      .def(
          "agree",
          [nanoseconds](ElasticMembers& self, int64_t committed, int64_t voted, double timeout) {
            return self.agree(committed, voted, nanoseconds(timeout));
          },
          py::arg("committed"), py::arg("voted"), py::arg("timeout"), Release());
}
#endif

// The codec of the mailbox, for messages over other backends.
void bindMessageCodec(py::module& m) {
  const auto bytesIn = [](const at::Tensor& tensor) -> std::span<const std::byte> {
    return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
  };
  m.def(
      "encode_message",
      [](const std::string& header, const std::vector<std::optional<at::Tensor>>& tensors,
         bool last, size_t least) {
        smddp::process_group::EncodedMessage message;
        {
          const py::gil_scoped_release release;
          message = smddp::process_group::encodeMessage(header, tensors, last, least);
        }
        return py::make_tuple(std::move(message.front), std::move(message.largeTensors));
      },
      py::arg("header"), py::arg("tensors"), py::arg("last"), py::arg("least"));
  m.def(
      "front_length",
      [bytesIn](const at::Tensor& begin) {
        return smddp::process_group::frontLength(bytesIn(begin));
      },
      py::arg("begin"));
  m.def(
      "decode_front",
      [bytesIn](const at::Tensor& front) {
        auto message = smddp::process_group::decodeFront(bytesIn(front));
        return py::make_tuple(py::bytes(message.header), std::move(message.tensors),
                              std::move(message.largeTensors));
      },
      py::arg("front"));
}

void bindSettings(py::module& m) {
  m.def("setting_names", &smddp::settingNames);
  m.def("settings", [] {
    py::list rows;
    for (const auto& row : smddp::describeSettings()) {
      rows.append(py::dict(
          py::arg("name") = row.name, py::arg("type") = row.type, py::arg("value") = row.value,
          py::arg("default") = row.defaultValue, py::arg("doc") = row.doc,
          py::arg("from_environment") = row.fromEnvironment, py::arg("expert") = row.isExpert));
    }
    return rows;
  });
  using smddp::ControlGroups;
  py::class_<ControlGroups>(m, "ControlGroups")
      .def(py::init([](const std::string& own, const std::string& groups) {
             return ControlGroups(own, groups);
           }),
           py::arg("own") = "/proc/self/cgroup", py::arg("groups") = "/sys/fs/cgroup")
      .def(
          "folders",
          [](const ControlGroups& groups, const std::string& controller) {
            std::vector<std::string> paths;
            for (const auto& path : groups.folders(controller)) paths.push_back(path.string());
            return paths;
          },
          py::arg("controller"))
      .def("available_memory", &ControlGroups::availableMemory)
      .def("available_threads", &ControlGroups::availableThreads);
  m.def("address_for_peers",
        [] { return smddp::engine::process::addressForPeers(smddp::settings()); });
  m.def("congestion_control", [] {
    const auto found = smddp::engine::process::congestionControl(smddp::settings());
    return py::dict(py::arg("system") = found.system,
                    py::arg("on_short_paths") = found.onShortPaths, py::arg("text") = found.text,
                    py::arg("hindered") = found.isHindered);
  });
  m.def(
      "set_congestion_control",
      [](int socket) { smddp::engine::process::setCongestionControl(smddp::settings(), socket); },
      py::arg("socket"));
  m.def("build_info", [] {
    const auto able = smddp::engine::process::capabilities();
    return py::dict(py::arg("version") = SMDDP_VERSION, py::arg("torch") = SMDDP_TORCH_VERSION,
                    py::arg("simd") = able.simd, py::arg("no_libfabric") = able.noFabric);
  });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  smddp::bindings::bindErrorTypes(m);
  smddp::bindings::installInterruptCheck();
  smddp::bindings::bindPlanTool(m);
  smddp::bindings::bindRandomNumber(m);
  bindProcessGroup(m);
  bindCallOrder(m);
  bindMailbox(m);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bindElasticMembers(m);
#endif
  bindMessageCodec(m);
  bindSettings(m);
}
