from ckptstore.integrations.axolotl.plugin import CkptstorePlugin as CkptstorePlugin
